"""Bodies that are read while they come: those of an append that are no JSON."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope

from nsm_core.errors import BodyTooLarge, BodyTooSlow, ServerStopping
from service.web.json_body import JsonRoute

LINES, TEXT = "application/x-ndjson", "text/plain"
# For the description of the JSON route
LIVE_OPERATION: dict[str, Any] = {
    "parameters": [
        {
            "name": "expected_version",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "of a live body, which has no field for it",
        }
    ],
    "requestBody": {
        "content": {
            LINES: {
                "schema": {"type": "string", "description": 'lines of {"text": …}, read as they come'},
                "example": '{"text": "Meanwhile, "}\n{"text": "in the harbour,"}\n',
            },
            TEXT: {
                "schema": {"type": "string", "description": "UTF-8, read as it comes"},
                "example": "Meanwhile, in the harbour,",
            },
        }
    },
}
LIVE_PATH = re.compile(r"/v1/sessions/[^/]+/append")
IDLE_S = 60.0  # between two pieces of a body
WHOLE_S = 3600.0  # for the whole body
STOP_POLL_S = 0.5  # how soon a waiting body notices that the server stops


def is_live(scope: Scope) -> bool:
    """Whether the handler itself reads the request's body."""
    if scope.get("method") != "POST" or not LIVE_PATH.fullmatch(scope.get("path", "")):
        return False
    kind = Headers(scope=scope).get("content-type", "")
    return kind.partition(";")[0].strip().lower() in (LINES, TEXT)


class LiveRoute(JsonRoute):
    """Beside a route for JSON at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if is_live(scope) else (Match.NONE, {})


async def read_live(
    receive: Receive,
    *,
    max_bytes: int,
    is_stopping: Callable[[], bool],
    idle_s: float = IDLE_S,
    whole_s: float = WHOLE_S,
) -> AsyncIterator[bytes]:
    """The pieces of the body. The next one is taken from the network only when it is asked for: a client that sends
    faster than its session reads has to wait.

    Raises ClientDisconnect, BodyTooLarge, BodyTooSlow, or ServerStopping.
    """
    num_bytes, deadline = 0, time.monotonic() + whole_s
    while True:
        message = asyncio.ensure_future(receive())
        try:
            last = min(time.monotonic() + idle_s, deadline)
            while not message.done():
                if is_stopping():
                    raise ServerStopping
                left_s = last - time.monotonic()
                if left_s <= 0:
                    raise BodyTooSlow(
                        f"the body stopped after {num_bytes} bytes: {idle_s:g} s may pass between two pieces of it, "
                        f"{whole_s:g} s in all"
                    )
                await asyncio.wait((message,), timeout=min(left_s, STOP_POLL_S))
        finally:
            message.cancel()
        given = message.result()
        if given["type"] == "http.disconnect":
            raise ClientDisconnect
        num_bytes += len(given.get("body", b""))
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"the body must have at most {max_bytes} bytes, got at least {num_bytes}")
        yield given.get("body", b"")
        if not given.get("more_body", False):
            return
