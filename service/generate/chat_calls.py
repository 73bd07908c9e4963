"""A chat's choice that may think or call tools: deltas of a stream, and the whole message."""

from __future__ import annotations

import uuid
from typing import Any

from nsm_core.thoughts import Part, ThoughtReader
from nsm_core.tool_form import ToolFormName
from service.generate.tool_stream import ArgumentsPiece, CallBegun, Piece, TextPiece, ToolCallReader


class CallingChoice:
    """Feed it the visible text, in order; then `finish`, once."""

    def __init__(self, *, is_either: bool, form: ToolFormName) -> None:
        self._reader = ToolCallReader(is_either=is_either, form=form)
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The `delta` objects that this text gives, maybe none."""
        return [self._delta(piece) for piece in _shown(self._reader.feed(text))]

    def finish(self) -> list[dict[str, Any]]:
        """Those of text that waited for more."""
        return [self._delta(piece) for piece in _shown(self._reader.finish())]

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def message(self) -> dict[str, Any]:
        """The fields of the whole message: `content` is null beside calls without a text."""
        text = "".join(self._texts)
        if not self._calls:
            return {"content": text}
        return {"content": text or None, "tool_calls": self._calls}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, TextPiece):
            self._texts.append(piece.text)
            return {"content": piece.text}
        if isinstance(piece, CallBegun):
            call = {"id": new_call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}}
            self._calls.append(call)
            return {"tool_calls": [{"index": piece.index, **call, "function": dict(call["function"])}]}  # type: ignore[arg-type]
        if isinstance(piece, ArgumentsPiece):
            function: Any = self._calls[piece.index]["function"]
            function["arguments"] += piece.text
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        raise TypeError("an ended call has no delta")


class ReadChoice:
    """A choice whose text is not shown as it is. Feed it the visible text, in order; then `finish`, once.

    `thoughts`, `calls`: those that it may have.
    """

    def __init__(self, *, thoughts: ThoughtReader | None, calls: CallingChoice | None) -> None:
        self._thoughts, self._calls = thoughts, calls
        self._thought: list[str] = []
        self._answer: list[str] = []

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.has_calls

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The `delta` objects that this text gives, maybe none."""
        if self._thoughts is None:
            return self._feed_answer(text)
        return self._feed_parts(self._thoughts.feed(text))

    def finish(self) -> list[dict[str, Any]]:
        """Those of text that waited for more."""
        deltas = [] if self._thoughts is None else self._feed_parts(self._thoughts.finish())
        return deltas if self._calls is None else [*deltas, *self._calls.finish()]

    def message(self) -> dict[str, Any]:
        """The fields of the whole message."""
        message = {"content": "".join(self._answer)} if self._calls is None else self._calls.message()
        return {**message, "reasoning_content": "".join(self._thought)} if self._thought else message

    def _feed_parts(self, parts: list[Part]) -> list[dict[str, Any]]:
        deltas = []
        for part in parts:
            if part.is_thought:
                self._thought.append(part.text)
                deltas.append({"reasoning_content": part.text})
            else:
                deltas += self._feed_answer(part.text)
        return deltas

    def _feed_answer(self, text: str) -> list[dict[str, Any]]:
        if self._calls is not None:
            return self._calls.feed(text)
        self._answer.append(text)
        return [{"content": text}] if text else []


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _shown(pieces: list[Piece]) -> list[Piece]:
    """Those that a client sees."""
    return [piece for piece in pieces if isinstance(piece, TextPiece | CallBegun | ArgumentsPiece)]
