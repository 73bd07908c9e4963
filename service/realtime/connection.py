"""One WebSocket: the client's events in, in order, and the server's events out.

A task reads events, another one does what they ask for, one after the other: so a cancel is heard while an answer runs.
What waits is bounded, and a client that does not read holds up its own answer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nsm_core.errors import InvalidRequest, NsmError, RateLimited, TurnCancelled
from service.deps import Services
from service.generate.chat import PrefixCutter
from service.generate.session_turn import SessionAnswer
from service.realtime.conversation import Conversation, ResponseOptions, now
from service.realtime.events import (
    MODALITIES,
    Event,
    ResponseShape,
    TextItem,
    error_event,
    id_of,
    max_tokens_of,
    new_event,
    object_of,
    require_known,
    require_text_only,
    text_of,
)
from service.served_models import holding_models
from service.web.errors import ErrorAnswer, report, shown
from service.web.errors import answer as answer_of

IDLE_S = 600.0  # without an event of the client, and without an answer
MAX_WAITING = 64  # events that are not done yet
NORMAL, GOING_AWAY, RESTART = 1000, 1001, 1012  # codes of a close
SESSION_FIELDS = ("type", "model", "instructions", "output_modalities", "max_output_tokens", "temperature", "seed")
RESPONSE_FIELDS = ("output_modalities", "max_output_tokens", "metadata", "conversation", "temperature", "seed")


class Socket:
    """What a connection needs of a WebSocket: `receive` gives None at its end, and `code` says how it ended."""

    code = NORMAL

    async def receive(self) -> bytes | str | None:
        raise NotImplementedError

    async def send(self, text: str) -> None:
        raise NotImplementedError

    async def close(self, code: int, reason: str) -> None:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """`event_id`: of the event that asked for it."""

    event_id: object
    act: Callable[[], Awaitable[None]]


class RealtimeConnection:
    """Of one client, from its first event to its last one."""

    def __init__(
        self, socket: Socket, services: Services, conversation: Conversation, *, request_id: str, idle_s: float = IDLE_S
    ) -> None:
        self._socket, self._conversation = socket, conversation
        self._tenants, self._lifecycle = services.tenants, services.lifecycle
        self._request_id, self._idle_s = request_id, idle_s
        self._defaults = ResponseOptions()
        self._waiting: asyncio.Queue[_Work] = asyncio.Queue(MAX_WAITING)
        self._num_responses = 0  # asked for and not done
        self._running: tuple[str, SessionAnswer] | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        """Until the client leaves, is idle for too long, or the server stops."""
        await self._send(new_event("session.created", session=self._session()))
        worker = asyncio.create_task(self._work())
        try:
            await self._receive()
        finally:
            await self._leave(worker)

    async def _leave(self, worker: asyncio.Task[None]) -> None:
        """A client that says goodbye ends its answer; one that is lost may come back for it."""
        if self._running is not None and self._socket.code in (NORMAL, GOING_AWAY):
            self._is_cancelled = True
            await self._conversation.cancel()
        worker.cancel()
        await asyncio.wait((worker,))

    async def _receive(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    given = await self._socket.receive()
            except TimeoutError:
                if self._num_responses:
                    continue
                await self._socket.close(GOING_AWAY, f"no event came for {self._idle_s:g} s")
                return
            if given is None:
                return
            event: Mapping[str, Any] = {}
            try:
                event = _decoded(given)
                self._require_rate()
                work = self._work_of(event)
            except NsmError as error:
                await self._send_error(error, event.get("event_id"))
                continue
            await self._waiting.put(work) if work is not None else await self._cancel(event)

    def _require_rate(self) -> None:
        """Each event counts as a request. Raises RateLimited."""
        allowance = self._tenants.take(self._conversation.key.tenant)
        if allowance is not None and allowance.retry_after_s is not None:
            raise RateLimited(
                f"too many events: try again in {allowance.retry_after_s:.2f} s", retry_after_s=allowance.retry_after_s
            )

    def _work_of(self, event: Mapping[str, Any]) -> _Work | None:
        """None for a cancel, which waits for nothing. Raises InvalidRequest."""
        kind, event_id = event.get("type"), id_of(event, "event_id", "event_id")
        if kind == "response.cancel":
            return None
        if kind == "session.update":
            return _Work(event_id, lambda: self._update(object_of(event, "session")))
        if kind == "conversation.item.create":
            item = TextItem.from_event(event)
            return _Work(event_id, lambda: self._read(item))
        if kind == "response.create":
            if self._num_responses:
                raise InvalidRequest(
                    "the conversation has an active response: wait for response.done",
                    code="conversation_already_has_active_response",
                )
            changes, metadata = self._response_changes(event)
            self._num_responses += 1
            return _Work(event_id, lambda: self._respond(changes, metadata, event_id))
        raise InvalidRequest(f"type {shown(kind)} is not supported: this server takes text events", param="type")

    async def _work(self) -> None:
        while True:
            work = await self._waiting.get()
            try:
                with holding_models():
                    await work.act()
            except NsmError as error:
                await self._send_error(error, work.event_id)

    async def _update(self, session: Mapping[str, Any]) -> None:
        require_known(session, SESSION_FIELDS, "session.")
        require_text_only(session, "session.")
        if session.get("type") not in (None, "realtime"):
            raise InvalidRequest("session.type must be 'realtime'", param="session.type")
        model = session.get("model")
        if model is not None and model != self._conversation.services.model_name:
            raise InvalidRequest("session.model cannot change", param="session.model")
        changes = self._changes(session, "session.")
        instructions = text_of(session, "instructions", "session.")
        if instructions:
            await self._conversation.instruct(instructions)
        self._defaults = dataclasses.replace(self._defaults, **changes)
        await self._send(new_event("session.updated", session=self._session()))

    async def _read(self, item: TextItem) -> None:
        await self._conversation.read(item, now(self._request_id))
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._send(new_event(kind, previous_item_id=None, item=item.shown()))

    def _response_changes(self, event: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
        """What the response has other than the defaults of its time, and its metadata. Raises InvalidRequest."""
        given = object_of(event, "response") if event.get("response") is not None else {}
        require_known(given, RESPONSE_FIELDS, "response.")
        require_text_only(given, "response.")
        if given.get("conversation") not in (None, "auto"):
            raise InvalidRequest("response.conversation must be 'auto'", param="response.conversation")
        metadata = given.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise InvalidRequest("response.metadata must be an object", param="response.metadata")
        return self._changes(given, "response."), metadata

    def _changes(self, given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """The options that a body names, in the ranges of this server; null is the server's default.

        Raises InvalidRequest that names the field as the client wrote it.
        """
        changes = {name: given[name] for name in ("temperature", "seed") if name in given}
        if "max_output_tokens" in given:
            changes["max_tokens"] = max_tokens_of(given, prefix)
        try:
            self._conversation.check(ResponseOptions(**changes))
        except ValidationError as error:
            raise _named(answer_of(RequestValidationError(error.errors())), prefix) from error
        except InvalidRequest as error:
            raise _named(answer_of(error), prefix) from error
        return changes

    async def _respond(
        self, changes: Mapping[str, Any], metadata: Mapping[str, str] | None, event_id: str | None
    ) -> None:
        """With the defaults of now: updates that came before it are done."""
        options = dataclasses.replace(self._defaults, **changes, key=event_id)
        try:
            answer = await self._conversation.answer(options, now(self._request_id))
            shape = ResponseShape(
                id=f"resp_{answer.turn_id.removeprefix('cmpl-')}",
                item_id=f"item_{answer.turn_id.removeprefix('cmpl-')[:24]}",
                conversation_id=self._conversation.key.session_id,
                metadata=metadata,
            )
            self._running, self._is_cancelled = (shape.id, answer), False
            try:
                await self._send_answer(shape, answer)
            finally:
                self._running = None
                answer.leave()
        finally:
            self._num_responses -= 1

    async def _send_answer(self, shape: ResponseShape, answer: SessionAnswer) -> None:
        for event in shape.begin():
            await self._send(event)
        cutter, texts = PrefixCutter(self._conversation.services.chat_template.answer_prefix), list[str]()
        try:
            async with contextlib.aclosing(answer.deltas()) as batches:
                async for batch in batches:
                    for _, delta in batch:
                        text = cutter.cut(delta)
                        if text:
                            texts.append(text)
                            await self._send(shape.delta(text))
                            answer.delivered()
        except NsmError as error:
            text = "".join(texts)
            if isinstance(error, TurnCancelled):
                events = shape.cancelled(text)
            else:
                report(error, request_id=self._request_id)
                events = shape.failed(text, answer_of(error, request_id=self._request_id))
        else:
            head = answer.outcome.head
            self._conversation.head = head
            events = shape.end("".join(texts), answer.outcome.finished, session=_position(head.version, head.position))
        for event in events:
            await self._send(event)

    async def _cancel(self, event: Mapping[str, Any]) -> None:
        wanted = event.get("response_id")
        if self._running is None or wanted not in (None, self._running[0]):
            error = InvalidRequest("there is no such active response", code="response_cancel_not_active")
            await self._send_error(error, event.get("event_id"))
            return
        self._is_cancelled = True
        await self._conversation.cancel()

    def _session(self) -> Event:
        """OpenAI's session object; beyond it the place of the session, to come back to it."""
        conversation = self._conversation
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": conversation.key.session_id,
            "model": conversation.services.model_name,
            "instructions": conversation.instructions or None,
            "output_modalities": MODALITIES,
            "max_output_tokens": self._defaults.max_tokens or "inf",
            **_position(conversation.head.version, conversation.head.position),
        }

    async def _send_error(self, error: NsmError, event_id: object) -> None:
        report(error, request_id=self._request_id)
        await self._send(error_event(answer_of(error, request_id=self._request_id), event_id))

    async def _send(self, event: Event) -> None:
        await self._socket.send(orjson.dumps(event).decode())


def _position(version: int, position: int) -> Event:
    return {"version": version, "position": position}


def _decoded(given: bytes | str) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    try:
        event = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"an event must be JSON: {error}") from error
    if not isinstance(event, dict):
        raise InvalidRequest(f"an event must be an object, got {shown(event)}")
    return event


def _named(answer: ErrorAnswer, prefix: str) -> InvalidRequest:
    """The error of a turn's field, under the name that the event has for it."""
    field = answer.param or ""
    name = prefix + ("max_output_tokens" if field == "max_tokens" else field)
    return InvalidRequest(name + answer.message.removeprefix(field), param=name)
