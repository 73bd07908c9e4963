"""Limits on the head of a request. uvicorn itself has none, neither on bytes nor on time."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus

from httptools import HttpParserCallbackError, HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.web.errors import INVALID, ErrorAnswer
from service.web.middleware import refusal_of_connection

RECEIVE_TIMEOUT_S = 30.0  # for a head; between two pieces of a body
MAX_HEAD_BYTES = 64 * 1024  # request line and headers; nginx's own limit is 32 KiB


class HeadTooLarge(Exception):
    """Raised through the parser, which then reads no further."""


class BoundedHead(HttpToolsProtocol):
    """Closes a connection without a whole head `head_s` seconds after its opening, or after the head's first bytes.
    Between requests uvicorn's keep-alive time applies; while a request is answered, no limit does.

    A head of more than MAX_HEAD_BYTES is refused before the rest is read. So are trailers, which follow a body.
    """

    head_s: float
    _deadline: asyncio.TimerHandle | None = None
    _num_head_bytes = 0  # of this request
    _num_pending_bytes = 0  # by the parser: a header whose end has not come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        if getattr(self.cycle, "response_complete", True):  # there is none before the first request
            self._begin()
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE, "head_too_large")

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)  # ": " and the end of the line
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_pending_bytes = 0
        self._end()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE, "head_too_large")
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP{_reason()}", "invalid_http")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _count(self, num_bytes: int) -> None:
        self._num_pending_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        """The standard error body, without the application."""
        refused = ErrorAnswer(status=status.value, type=INVALID, message=message, code=code)
        response = refusal_of_connection(refused)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()

    def _begin(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self.transport.close)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _reason() -> str:
    """What the parser found, where it is handled; empty where one of our callbacks raised."""
    error = sys.exception()
    is_known = isinstance(error, HttpParserError) and not isinstance(error, HttpParserCallbackError)
    return f": {error}" if is_known and str(error) else ""


_TOO_LARGE = f"the request line and the headers must have at most {MAX_HEAD_BYTES} bytes"
