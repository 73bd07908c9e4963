"""How an admitted generation leaves the server: as a stream, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.responses import Response

from service.json_body import json_response
from service.sse import EventStream, json_stream


class Answer(Protocol):
    """One admitted body; `chunks` or `collect` is read once, then, whatever happened, `leave` is called."""

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]: ...

    async def collect(self) -> dict[str, Any]: ...

    def leave(self) -> None:
        """Nobody reads any more: stop what still runs, if it runs for this reader only. Idempotent, never blocks."""
        ...


async def send(answer: Answer, *, is_stream: bool, request_id: str) -> Response:
    """However it ends, also when the client leaves (this task is then cancelled), the answer is left at last."""
    if is_stream:
        return EventStream(json_stream(answer.chunks(), request_id=request_id), on_close=answer.leave)
    try:
        return json_response(await answer.collect())
    finally:
        answer.leave()
