"""Sends an admitted generation, as a stream or as one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.responses import Response

from service.web.json_body import json_response
from service.web.sse import EventStream, PartWriter, until_done


class Answer(Protocol):
    """One admitted body. Read `frames` or `collect` once, and call `leave` in every case."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, those that are ready together in one piece."""
        ...

    def attach(self, writer: PartWriter) -> None:
        """Before `frames`: plain text may be written by `writer` while the frames wait."""
        ...

    async def collect(self) -> dict[str, Any]: ...

    def leave(self) -> None:
        """The reader left: stop work that is for this reader only. Idempotent, never blocks."""
        ...


async def send(answer: Answer, *, is_stream: bool, request_id: str) -> Response:
    """`leave` is called in every case, also when the client leaves, which cancels this task."""
    if is_stream:
        return EventStream(
            until_done(answer.frames(), request_id=request_id), on_close=answer.leave, on_open=answer.attach
        )
    try:
        return json_response(await answer.collect())
    finally:
        answer.leave()
