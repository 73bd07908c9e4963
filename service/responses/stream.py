"""The events of one response, out of the pieces of its text; and the items that its output has at the end.

Without tools there is one message, whose item is opened before the first piece. With tools an item is opened when its
first piece is there: a message, or a call. So is the item of a thought, which comes before them. Everything follows
from the pieces, in their order, so that whoever reads a response again gets the same events under the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from nsm_core.chat_template import Reasoning
from nsm_core.hashing import identity_of
from nsm_core.thoughts import ThoughtReader
from nsm_core.tool_form import ToolFormName
from service.generate.tool_stream import ArgumentsPiece, CallBegun, CallEnded, Piece, TextPiece, ToolCallReader
from service.responses.format import LAST_EVENTS, Event, Response
from service.schemas.items import Item, output_item, output_text
from service.schemas.responses import tool_use_of

CALL_ID_CHARS = 24


class ResponseStream:
    """Of one reader: `begin`, then `feed` for each batch of pieces, then `end`. `number` events were given so far.

    `reasoning`, `tool_form`: see ChatTemplate, of the template by which the answer is read.
    """

    def __init__(self, opened: Response, item_id: str, *, reasoning: Reasoning, tool_form: ToolFormName) -> None:
        self._opened, self._item_id = opened, item_id
        self._builder = _builder_of(opened, item_id, reasoning, tool_form)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The items of a whole answer. `num_thought_pieces`: pieces that the thought took."""

    items: list[Item]
    num_thought_pieces: int


def output_of(
    opened: Response,
    item_id: str,
    pieces: Iterable[str],
    *,
    status: str,
    reasoning: Reasoning,
    tool_form: ToolFormName,
) -> Output:
    """`status`: of the item that the answer ends with."""
    builder = _builder_of(opened, item_id, reasoning, tool_form)
    builder.begin()
    if not isinstance(builder, _ThinkingBuilder):
        builder.feed("".join(pieces))
        builder.end(status)
        return Output(builder.items, 0)
    for piece in pieces:
        builder.feed(piece)
    builder.end(status)
    return Output(builder.items, builder.num_thought_pieces)


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

    def __init__(self, item_id: str, *, is_either: bool, form: ToolFormName) -> None:
        self._item_id = item_id
        self._reader = ToolCallReader(is_either=is_either, form=form)
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


class _ThinkingBuilder:
    """A thought, then what `answer` builds. An answer that ends within its thought has nothing else."""

    def __init__(self, item_id: str, answer: _MessageBuilder | _CallingBuilder, *, is_open: bool) -> None:
        self._id = f"rs_{identity_of(item_id, 'thought')[:32]}"
        self._reader = ThoughtReader(is_open=is_open)
        self._answer = answer
        self._thought: list[str] = []
        self._has_thought = self._has_answer = False  # whether each has begun
        self._item: Item | None = None  # of the thought, once it has ended
        self.num_thought_pieces = 0

    @property
    def items(self) -> list[Item]:
        return [*([] if self._item is None else [self._item]), *self._answer.items]

    def begin(self) -> list[Event]:
        return []

    def feed(self, piece: str) -> list[Event]:
        events = [event for part in self._reader.feed(piece) for event in self._events(part.text, part.is_thought)]
        self.num_thought_pieces += self._has_thought and not self._has_answer
        return events

    def end(self, status: str) -> list[Event]:
        events = [event for part in self._reader.finish() for event in self._events(part.text, part.is_thought)]
        if self._has_thought and not self._has_answer:
            return [*events, *self._end_thought(status)]
        return [*events, *self._begin_answer(), *self._shifted(self._answer.end(status))]

    def _events(self, text: str, is_thought: bool) -> list[Event]:
        if not is_thought:
            return [*self._begin_answer(), *self._shifted(self._answer.feed(text))]
        begun = [] if self._has_thought else _thought_begun(self._id)
        self._has_thought = True
        self._thought.append(text)
        return [*begun, {"type": "response.reasoning_text.delta", **_thought_location(self._id), "delta": text}]

    def _begin_answer(self) -> list[Event]:
        if self._has_answer:
            return []
        self._has_answer = True
        return [*(self._end_thought("completed") if self._has_thought else []), *self._shifted(self._answer.begin())]

    def _end_thought(self, status: str) -> list[Event]:
        self._item = _thought_item(self._id, "".join(self._thought), status=status)
        part = self._item["content"][0]
        return [
            {"type": "response.reasoning_text.done", **_thought_location(self._id), "text": part["text"]},
            {"type": "response.content_part.done", **_thought_location(self._id), "part": part},
            {"type": "response.output_item.done", "output_index": 0, "item": self._item},
        ]

    def _shifted(self, events: list[Event]) -> list[Event]:
        return [{**event, "output_index": event["output_index"] + self._has_thought} for event in events]


def _builder_of(
    opened: Response, item_id: str, reasoning: Reasoning, tool_form: ToolFormName
) -> _MessageBuilder | _CallingBuilder | _ThinkingBuilder:
    """An answer in a form, or a call that must come, has no thought before it."""
    use, has_form = tool_use_of(opened), opened["text"]["format"]["type"] != "text"
    answer: _CallingBuilder | _MessageBuilder = _MessageBuilder(item_id)
    if use.tools:
        answer = _CallingBuilder(item_id, is_either=has_form, form=tool_form)
    if reasoning == "none" or has_form or use.is_forced:
        return answer
    return _ThinkingBuilder(item_id, answer, is_open=reasoning == "open")


def _thought_item(item_id: str, text: str | None, *, status: str) -> Item:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _thought_location(item_id: str) -> dict[str, Any]:
    return {"item_id": item_id, "output_index": 0, "content_index": 0}


def _thought_begun(item_id: str) -> list[Event]:
    return [
        _added(_thought_item(item_id, None, status="in_progress"), 0),
        {
            "type": "response.content_part.added",
            **_thought_location(item_id),
            "part": {"type": "reasoning_text", "text": ""},
        },
    ]


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
