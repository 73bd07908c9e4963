"""The visible text of an answer -> its thought, and what follows: models write thoughts between tags."""

from __future__ import annotations

import dataclasses

OPEN, CLOSE = "<think>", "</think>"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of the thought, or of the answer after it."""

    text: str
    is_thought: bool


class ThoughtReader:
    """Reads text in pieces of any size. The joined parts do not depend on how it was cut.

    The tags and the white space beside them are dropped. A text that begins with no thought is all answer.
    """

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside a thought, so that the text has no opening tag."""
        self._read = self._read_thought if is_open else self._read_start
        self._waiting = ""
        self._is_stripping = is_open  # white space at the beginning of a part

    def feed(self, text: str) -> list[Part]:
        """What became known with this text."""
        self._waiting += text
        parts: list[Part] = []
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Text that waited for more of a tag; white space at the end of a thought is dropped."""
        text, self._waiting = self._waiting, ""
        is_thought = self._read == self._read_thought
        text = text.rstrip() if is_thought else text
        return [Part(text, is_thought)] if text else []

    def _read_start(self, parts: list[Part]) -> bool:
        begun = self._waiting.lstrip()
        if begun.startswith(OPEN):
            self._waiting, self._read, self._is_stripping = begun[len(OPEN) :], self._read_thought, True
            return True
        if OPEN.startswith(begun):  # nothing yet, or the beginning of the tag
            return False
        self._read = self._read_answer
        return True

    def _read_thought(self, parts: list[Part]) -> bool:
        self._strip()
        thought, mark, after = self._waiting.partition(CLOSE)
        if not mark:
            num_held = _num_held(thought)
            self._waiting, thought = thought[len(thought) - num_held :], thought[: len(thought) - num_held]
        else:
            self._waiting, thought, self._read = after, thought.rstrip(), self._read_answer
        if thought:
            parts.append(Part(thought, is_thought=True))
            self._is_stripping = False
        self._is_stripping = self._is_stripping or bool(mark)
        return bool(mark)

    def _read_answer(self, parts: list[Part]) -> bool:
        self._strip()
        text, self._waiting = self._waiting, ""
        if text:
            parts.append(Part(text, is_thought=False))
            self._is_stripping = False
        return False

    def _strip(self) -> None:
        if self._is_stripping:
            self._waiting = self._waiting.lstrip()


def _num_held(text: str) -> int:
    """The length of the end of `text` that may be dropped: white space, and the beginning of the closing tag."""
    size = next((size for size in range(min(len(text), len(CLOSE) - 1), 0, -1) if text.endswith(CLOSE[:size])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())


def begins_with_thought(text: str) -> bool:
    """Whether an answer whose prompt opens no thought begins with one of its own."""
    return text.lstrip().startswith(OPEN)
