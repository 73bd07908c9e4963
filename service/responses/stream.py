"""The events of one response, out of the pieces of its text; and the items that its output has at the end.

Without tools there is one message, whose item is opened before the first piece. With tools an item is opened when its
first piece is there: a message, or a call. Everything follows from the pieces, in their order, so that whoever reads a
response again gets the same events under the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsm_core.hashing import identity_of
from service.generate.tool_stream import ArgumentsPiece, CallBegun, CallEnded, Piece, TextPiece, ToolCallReader
from service.responses.format import LAST_EVENTS, Event, Response
from service.schemas.items import Item, output_item, output_text
from service.schemas.responses import tool_use_of

CALL_ID_CHARS = 24


class ResponseStream:
    """Of one reader: `begin`, then `feed` for each batch of pieces, then `end`. `number` events were given so far."""

    def __init__(self, opened: Response, item_id: str) -> None:
        self._opened, self._item_id = opened, item_id
        self._builder = _builder_of(opened, item_id)
        self.number = 0

    def begin(self) -> list[Event]:
        """The events before the first piece."""
        return self._numbered(
            [
                {"type": "response.created", "response": self._opened},
                {"type": "response.in_progress", "response": self._opened},
                *self._builder.begin(),
            ]
        )

    def feed(self, pieces: Sequence[str]) -> list[Event]:
        """Those of further pieces."""
        return self._numbered([event for piece in pieces for event in self._builder.feed(piece)])

    def end(self, ended: Response) -> list[Event]:
        """Those after the last piece; only the last of them for a response that gave no output."""
        last = {"type": LAST_EVENTS[ended["status"]], "response": ended}
        closing = self._builder.end(ended["status"]) if ended["output"] else []
        return self._numbered([*closing, last])

    def _numbered(self, events: list[Event]) -> list[Event]:
        start, self.number = self.number, self.number + len(events)
        return [{**event, "sequence_number": start + offset} for offset, event in enumerate(events)]


def output_of(opened: Response, item_id: str, text: str, *, status: str) -> list[Item]:
    """The items of a whole answer; `status`: of the one that it ends with."""
    builder = _builder_of(opened, item_id)
    builder.begin()
    builder.feed(text)
    builder.end(status)
    return builder.items


class _MessageBuilder:
    """One message, whatever comes."""

    def __init__(self, item_id: str) -> None:
        self._item_id, self._texts = item_id, list[str]()
        self.items: list[Item] = []

    def begin(self) -> list[Event]:
        return _message_begun(self._item_id, 0)

    def feed(self, piece: str) -> list[Event]:
        self._texts.append(piece)
        return [_text_delta(self._item_id, 0, piece)]

    def end(self, status: str) -> list[Event]:
        self.items.append(output_item(self._item_id, "".join(self._texts), status=status))
        return _message_ended(self.items[0], 0)


class _CallingBuilder:
    """A message, or calls, or both."""

    def __init__(self, item_id: str, *, is_either: bool) -> None:
        self._item_id = item_id
        self._reader = ToolCallReader(is_either=is_either)
        self._text: str | None = None
        self._call: Item | None = None  # the one that has begun and not ended
        self.items: list[Item] = []

    def begin(self) -> list[Event]:
        return []

    def feed(self, piece: str) -> list[Event]:
        return [event for part in self._reader.feed(piece) for event in self._events(part)]

    def end(self, status: str) -> list[Event]:
        events = [event for part in self._reader.finish() for event in self._events(part)]
        if not self.items and self._text is None and self._call is None:  # an answer of no text is one all the same
            events += self._events(TextPiece(""))
        return [*events, *self._close_message(status), *self._close_call(status)]

    def _events(self, part: Piece) -> list[Event]:
        index = len(self.items)
        if isinstance(part, TextPiece):
            begun = _message_begun(self._item_id, index) if self._text is None else []
            self._text = (self._text or "") + part.text
            return [*begun, _text_delta(self._item_id, index, part.text)]
        if isinstance(part, CallBegun):
            closed = self._close_message("completed")
            self._call = self._new_call(part)
            return [*closed, _added(self._call, len(self.items))]
        if isinstance(part, ArgumentsPiece) and self._call is not None:
            self._call = {**self._call, "arguments": self._call["arguments"] + part.text}
            return [{"type": "response.function_call_arguments.delta", **self._of_call(), "delta": part.text}]
        return self._close_call("completed") if isinstance(part, CallEnded) else []

    def _of_call(self) -> dict[str, Any]:
        return {"item_id": (self._call or {})["id"], "output_index": len(self.items)}

    def _new_call(self, begun: CallBegun) -> Item:
        """Ids follow from the response's own, so that they are the same wherever its stream is read."""
        digest = identity_of(self._item_id, str(begun.index))
        return {
            "id": f"fc_{digest[:32]}",
            "type": "function_call",
            "call_id": f"call_{digest[:CALL_ID_CHARS]}",
            "name": begun.name,
            "arguments": "",
            "status": "in_progress",
        }

    def _close_message(self, status: str) -> list[Event]:
        if self._text is None or self.items:
            return []
        item = output_item(self._item_id, self._text, status=status)
        self.items.append(item)
        return _message_ended(item, 0)

    def _close_call(self, status: str) -> list[Event]:
        if self._call is None:
            return []
        item, of_call = {**self._call, "status": status}, self._of_call()
        self._call = None
        self.items.append(item)
        named = {"name": item["name"], "arguments": item["arguments"]}
        return [
            {"type": "response.function_call_arguments.done", **of_call, **named},
            {"type": "response.output_item.done", "output_index": of_call["output_index"], "item": item},
        ]


def _builder_of(opened: Response, item_id: str) -> _MessageBuilder | _CallingBuilder:
    if not tool_use_of(opened).tools:
        return _MessageBuilder(item_id)
    return _CallingBuilder(item_id, is_either=opened["text"]["format"]["type"] != "text")


def _added(item: Item, index: int) -> Event:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _message_begun(item_id: str, index: int) -> list[Event]:
    location = {"item_id": item_id, "output_index": index, "content_index": 0}
    return [
        _added(output_item(item_id, None, status="in_progress"), index),
        {"type": "response.content_part.added", **location, "part": output_text("")},
    ]


def _text_delta(item_id: str, index: int, text: str) -> Event:
    location = {"item_id": item_id, "output_index": index, "content_index": 0}
    return {"type": "response.output_text.delta", **location, "delta": text, "logprobs": []}


def _message_ended(item: Item, index: int) -> list[Event]:
    part = item["content"][0]
    location = {"item_id": item["id"], "output_index": index, "content_index": 0}
    return [
        {"type": "response.output_text.done", **location, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **location, "part": part},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]
