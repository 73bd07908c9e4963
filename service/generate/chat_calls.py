"""A chat's choice that may call tools: deltas of a stream, and the whole message."""

from __future__ import annotations

import uuid
from typing import Any

from service.generate.tool_stream import ArgumentsPiece, CallBegun, Piece, TextPiece, ToolCallReader


class CallingChoice:
    """Feed it the visible text, in order; then `finish`, once."""

    def __init__(self, *, is_either: bool) -> None:
        self._reader = ToolCallReader(is_either=is_either)
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


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _shown(pieces: list[Piece]) -> list[Piece]:
    """Those that a client sees."""
    return [piece for piece in pieces if isinstance(piece, TextPiece | CallBegun | ArgumentsPiece)]
