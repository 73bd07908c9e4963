"""The bytes of a live body, cut where they may be: into pieces of text that do not depend on the network.

Each piece is encoded for itself. So the same body gives the same tokens, however it was split on its way.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator
from email.message import Message
from typing import Protocol

from starlette.exceptions import HTTPException

from nsm_core.errors import InvalidRequest
from service.web.errors import shown
from service.web.json_body import INLINE_BYTES, UTF8_NAMES, parse
from service.web.live_body import LINES

MAX_LINE_BYTES = INLINE_BYTES
PIECE_CHARS = 1024  # of plain text


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`raw`: its bytes in the body; those of all pieces are the body. `text` may be empty."""

    text: str
    raw: bytes


class Cutter(Protocol):
    """Gives the pieces that are whole by now. Raises InvalidRequest after those before the fault."""

    def feed(self, data: bytes) -> Iterator[Piece]: ...

    def end(self) -> Iterator[Piece]:
        """The body has ended."""
        ...


class LineCutter:
    """Of lines {"text": …}: each is a piece."""

    def __init__(self) -> None:
        self._rest = b""
        self._num_lines = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield self._piece(line, b"\n")
        self._check_size(self._rest)

    def end(self) -> Iterator[Piece]:
        if self._rest:
            yield self._piece(self._rest, b"")

    def _piece(self, line: bytes, ending: bytes) -> Piece:
        self._check_size(line)
        self._num_lines += 1
        return Piece(self._text_of(line) if line.strip() else "", line + ending)

    def _check_size(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            number = self._num_lines + 1
            raise InvalidRequest(f"line {number} must have at most {MAX_LINE_BYTES} bytes", param="text")

    def _text_of(self, line: bytes) -> str:
        where = f"line {self._num_lines}"
        try:
            value = parse(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}", param=error.param, code=error.code) from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"{where} must be an object with text, got {shown(value)}", param="text")
        for name in value:
            if name != "text":
                raise InvalidRequest(f"{where}: {name!r} is not known: a line has text only", param=name)
        text = value.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}: text must be a string, got {shown(text)}", param="text")
        return text


class TextCutter:
    """Of plain UTF-8: a piece ends before the last blank of PIECE_CHARS characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._num_bytes = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        self._decode(data)
        while len(self._text) > PIECE_CHARS:
            blank = max(self._text.rfind(mark, 1, PIECE_CHARS) for mark in " \n")
            position = blank if blank > 0 else PIECE_CHARS
            text, self._text = self._text[:position], self._text[position:]
            yield Piece(text, text.encode())

    def end(self) -> Iterator[Piece]:
        self._decode(b"", is_end=True)
        if self._text:
            yield Piece(self._text, self._text.encode())

    def _decode(self, data: bytes, *, is_end: bool = False) -> None:
        waiting = len(self._decoder.getstate()[0])
        try:
            self._text += self._decoder.decode(data, is_end)
        except UnicodeDecodeError as error:
            position = self._num_bytes - waiting + error.start
            raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {position}", param="body") from error
        self._num_bytes += len(data)


def cutter_of(content_type: str) -> Cutter:
    """Raises HTTPException 415 for a charset other than UTF-8."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_charset("utf-8") not in UTF8_NAMES:
        raise HTTPException(415, f"the Content-Type must have no charset but utf-8, got {content_type}")
    return LineCutter() if header.get_content_type() == LINES else TextCutter()
