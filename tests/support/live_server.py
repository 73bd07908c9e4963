"""A real uvicorn on a real socket, in the test's own event loop: what clients see of streams and of leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from service.web.connection import connection_class
from service.web.head_limits import RECEIVE_TIMEOUT_S
from service.web.websocket import WebSocketConnection


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, **options: Any) -> AsyncIterator[str]:
    """The base URL of `app` while it is served on a free port. `options`: of `uvicorn.Config`."""
    http = connection_class(RECEIVE_TIMEOUT_S)  # as the product serves
    fields = {"host": "127.0.0.1", "port": 0, "log_config": None, "lifespan": "on", "http": http}
    fields |= {"ws": WebSocketConnection, **options}
    server = uvicorn.Server(uvicorn.Config(app, **fields))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            await task
            raise RuntimeError("the server did not start")
        await asyncio.sleep(0.001)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task
