"""The shapes of realtime events, as the `openai` package's types have them, for text alone."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import InvalidRequest
from service.web.errors import ErrorAnswer, shown

Event = dict[str, Any]

ID = re.compile(r"[!-~]{1,128}")
ROLES = ("user", "system")
PART = "input_text"
MODALITIES = ["text"]


def new_event(kind: str, **fields: Any) -> Event:
    return {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **fields}


def error_event(answer: ErrorAnswer, event_id: object) -> Event:
    """`event_id`: of the client's event that it answers, if it had one."""
    error = {"type": answer.type, "code": answer.code, "message": answer.message, "param": answer.param}
    return new_event("error", error={**error, "event_id": event_id if isinstance(event_id, str) else None})


def id_of(event: Mapping[str, Any], name: str, param: str) -> str | None:
    """An id that the client chose. Raises InvalidRequest."""
    given = event.get(name)
    if given is not None and not (isinstance(given, str) and ID.fullmatch(given)):
        raise InvalidRequest(
            f"{param} must be 1 to 128 printable ASCII characters without spaces, got {shown(given)}", param=param
        )
    return given


def object_of(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    given = event.get(name)
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} must be an object, got {shown(given)}", param=name)
    return given


def require_known(given: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    """Raises InvalidRequest for a field that would do nothing; null is no field."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise InvalidRequest(f"{prefix}{name} is not supported", param=f"{prefix}{name}")


def require_text_only(given: Mapping[str, Any], prefix: str) -> None:
    """Raises InvalidRequest."""
    modalities = given.get("output_modalities")
    if modalities is not None and modalities != MODALITIES:
        raise InvalidRequest(
            f"{prefix}output_modalities must be ['text'], got {shown(modalities)}", param=f"{prefix}output_modalities"
        )


def text_of(given: Mapping[str, Any], name: str, prefix: str) -> str | None:
    """Raises InvalidRequest."""
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{prefix}{name} must be a string, got {shown(value)}", param=f"{prefix}{name}")
    return value


def max_tokens_of(given: Mapping[str, Any], prefix: str) -> int | None:
    """None for "inf" and where there is none. Raises InvalidRequest."""
    value = given.get("max_output_tokens")
    if value in (None, "inf"):
        return None
    if type(value) is not int or value < 1:
        param = f"{prefix}max_output_tokens"
        raise InvalidRequest(f"{param} must be a whole number of at least 1, or 'inf', got {shown(value)}", param=param)
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextItem:
    """A message of the client. `id`: its own, or one that was made up."""

    id: str
    role: str
    text: str

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> TextItem:
        """Raises InvalidRequest."""
        if event.get("previous_item_id") is not None:
            raise InvalidRequest(
                "previous_item_id is not supported: an item is read after all that came before it",
                param="previous_item_id",
            )
        item = object_of(event, "item")
        require_known(item, ("id", "object", "type", "status", "role", "content"), "item.")
        if item.get("type") != "message":
            raise InvalidRequest(f"item.type must be 'message', got {shown(item.get('type'))}", param="item.type")
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise InvalidRequest(f"item.role must be 'user' or 'system', got {shown(role)}", param="item.role")
        if not isinstance(content, list) or not content:
            raise InvalidRequest("item.content must be a list with at least one part", param="item.content")
        text = "".join(_part_text(part, number) for number, part in enumerate(content))
        return cls(id=id_of(item, "id", "item.id") or f"item_{uuid.uuid4().hex[:24]}", role=str(role), text=text)

    def shown(self) -> Event:
        content = [{"type": PART, "text": self.text}]
        fields = {"id": self.id, "object": "realtime.item", "type": "message", "status": "completed"}
        return {**fields, "role": self.role, "content": content}


def _part_text(part: object, number: int) -> str:
    param = f"item.content[{number}]"
    if not isinstance(part, dict) or part.get("type") != PART or not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{param} must be of type 'input_text' with a text: this server reads text", param=param)
    return str(part["text"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """The events of one response, whose one item is a message with one text."""

    id: str
    item_id: str
    conversation_id: str
    metadata: Mapping[str, str] | None = None

    def response(self, status: str, *, text: str | None = None, **fields: Any) -> Event:
        output = [] if text is None else [self.item(status, text)]
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "conversation_id": self.conversation_id,
            "output": output,
            "output_modalities": MODALITIES,
            "metadata": self.metadata,
            "usage": None,
            **fields,
        }

    def item(self, status: str, text: str | None) -> Event:
        shown = status if status in ("completed", "in_progress") else "incomplete"
        content = [] if text is None else [{"type": "output_text", "text": text}]
        fields = {"id": self.item_id, "object": "realtime.item", "type": "message", "status": shown}
        return {**fields, "role": "assistant", "content": content}

    def begin(self) -> list[Event]:
        item = self.item("in_progress", None)
        return [
            new_event("response.created", response=self.response("in_progress")),
            new_event("response.output_item.added", response_id=self.id, output_index=0, item=item),
            new_event("conversation.item.added", previous_item_id=None, item=item),
            new_event("response.content_part.added", **self._at(), part={"type": "text", "text": ""}),
        ]

    def delta(self, text: str) -> Event:
        return new_event("response.output_text.delta", **self._at(), delta=text)

    def end(self, text: str, finished: Finished, **session: Any) -> list[Event]:
        is_cut = finished.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        details = {"type": status, "reason": "max_output_tokens"} if is_cut else {"type": status}
        response = self.response(
            status, text=text, status_details=details, usage=_usage(finished), max_output_tokens=None, **session
        )
        return [*self._closing(status, text), new_event("response.done", response=response)]

    def cancelled(self, text: str) -> list[Event]:
        details = {"type": "cancelled", "reason": "client_cancelled"}
        response = self.response("cancelled", text=text, status_details=details)
        return [*self._closing("cancelled", text), new_event("response.done", response=response)]

    def failed(self, text: str, answer: ErrorAnswer) -> list[Event]:
        error = {"type": answer.type, "code": answer.code, "message": answer.message}
        response = self.response("failed", text=text, status_details={"type": "failed", "error": error})
        return [new_event("response.done", response=response)]

    def _closing(self, status: str, text: str) -> list[Event]:
        item = self.item(status, text)
        return [
            new_event("response.output_text.done", **self._at(), text=text),
            new_event("response.content_part.done", **self._at(), part={"type": "text", "text": text}),
            new_event("response.output_item.done", response_id=self.id, output_index=0, item=item),
            new_event("conversation.item.done", previous_item_id=None, item=item),
        ]

    def _at(self) -> Event:
        return {"response_id": self.id, "item_id": self.item_id, "output_index": 0, "content_index": 0}


def _usage(finished: Finished) -> Event:
    read, sampled = finished.prompt_tokens, finished.completion_tokens
    cached = finished.cached_tokens
    return {
        "input_tokens": read,
        "output_tokens": sampled,
        "total_tokens": read + sampled,
        "input_token_details": {"cached_tokens": cached, "text_tokens": read, "audio_tokens": 0},
        "output_token_details": {"text_tokens": sampled, "audio_tokens": 0},
    }
