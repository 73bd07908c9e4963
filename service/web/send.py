"""How an admitted generation leaves the server: as a stream, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.responses import Response

from service.web.json_body import json_response
from service.web.sse import EventStream, until_done


class Answer(Protocol):
    """One admitted body; `frames` or `collect` is read once, then, whatever happened, `leave` is called."""

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, those that are ready together in one piece."""
        ...

    async def collect(self) -> dict[str, Any]: ...

    def leave(self) -> None:
        """Nobody reads any more: stop what still runs, if it runs for this reader only. Idempotent, never blocks."""
        ...


async def send(answer: Answer, *, is_stream: bool, request_id: str) -> Response:
    """However it ends, also when the client leaves (this task is then cancelled), the answer is left at last."""
    if is_stream:
        return EventStream(until_done(answer.frames(), request_id=request_id), on_close=answer.leave)
    try:
        return json_response(await answer.collect())
    finally:
        answer.leave()
