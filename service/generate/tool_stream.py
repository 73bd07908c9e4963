"""The visible text of an answer that may call tools -> pieces of its text and of its calls."""

from __future__ import annotations

import dataclasses
import json
import re

from nsm_core.grammars.tool_calls import ARGUMENTS_KEY, NAME_KEY
from nsm_core.tool_form import TOOL_FORM_OF, ToolFormName

_HEAD = re.compile(re.escape(NAME_KEY) + r'("(?:[^"\\]|\\.)*")' + re.escape(ARGUMENTS_KEY))


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegun:
    """`index`: of the call in the answer, from 0."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A piece of the call's arguments, which are JSON when all are joined and the call is whole."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


Piece = TextPiece | CallBegun | ArgumentsPiece | CallEnded


class ToolCallReader:
    """Reads what `tools_grammar` allows, in pieces of any size. The pieces it gives depend on the joined text and, in
    their borders only, on how it was cut.
    """

    def __init__(self, *, form: ToolFormName, is_either: bool = False) -> None:
        """`form`: of the calls. `is_either`: the answer is a text in a form of its own, whatever marks are in it, or
        calls.
        """
        marks = TOOL_FORM_OF[form]
        self._open, self._close = marks.open, "}" + marks.close
        self._is_either = is_either
        self._waiting = ""  # text that cannot be told yet
        self._read = self._read_text
        self._arguments = _ObjectEnd()
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """What became known with this text."""
        self._waiting += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Text that waited for more of a mark. A call that was cut has no CallEnded."""
        text, self._waiting = self._waiting, ""
        is_text = self._read == self._read_text and self.num_calls == 0
        return [TextPiece(text)] if text and is_text else []

    def _read_text(self, pieces: list[Piece]) -> bool:
        if self._is_either and self.num_calls == 0 and not self._open.startswith(self._waiting[: len(self._open)]):
            text, self._waiting = self._waiting, ""
            self._read = self._read_rest
            pieces.append(TextPiece(text))
            return False
        before, mark, after = self._waiting.partition(self._open)
        if mark:
            self._waiting, self._read = after, self._read_head
        else:
            num_held = _overlap(before, self._open)
            self._waiting, before = before[len(before) - num_held :], before[: len(before) - num_held]
        if before and self.num_calls == 0:  # what stands between calls is no text
            pieces.append(TextPiece(before))
        return bool(mark)

    def _read_rest(self, pieces: list[Piece]) -> bool:
        text, self._waiting = self._waiting, ""
        if text:
            pieces.append(TextPiece(text))
        return False

    def _read_head(self, pieces: list[Piece]) -> bool:
        head = _HEAD.match(self._waiting)
        if head is None:
            return False
        pieces.append(CallBegun(self.num_calls, json.loads(head[1])))
        self._waiting, self._read, self._arguments = self._waiting[head.end() :], self._read_arguments, _ObjectEnd()
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        end = self._arguments.find(self._waiting)
        text, self._waiting = self._waiting[:end], self._waiting[end:]
        if text:
            pieces.append(ArgumentsPiece(self.num_calls, text))
        if self._arguments.is_found:
            self._read = self._read_close
        return self._arguments.is_found

    def _read_close(self, pieces: list[Piece]) -> bool:
        if not self._waiting.startswith(self._close):
            return False
        pieces.append(CallEnded(self.num_calls))
        self.num_calls += 1
        self._waiting, self._read = self._waiting[len(self._close) :], self._read_text
        return True


class _ObjectEnd:
    """Finds where a JSON object ends, over texts that follow each other."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_found = False

    def find(self, text: str) -> int:
        """The number of characters of this text that belong to the object."""
        for index, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_found = True
                    return index + 1
        return len(text)


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
