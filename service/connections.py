"""Connections that ask nothing: uvicorn itself waits for ever for the rest of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HeadDeadline(HttpToolsProtocol):
    """Closes a connection whose next request's head is not there `head_s` seconds after it was opened, or after the
    head's first bytes. Between requests uvicorn's keep-alive counts, while one is answered nothing does.
    """

    head_s: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        if getattr(self.cycle, "response_complete", True):  # there is none before the first request
            self._begin()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self.transport.close)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def with_head_deadline(head_s: float) -> type[HeadDeadline]:
    """A protocol for `uvicorn.Config(http=…)`."""
    fields: dict[str, Any] = {"head_s": head_s}
    return type("HeadDeadline", (HeadDeadline,), fields)
