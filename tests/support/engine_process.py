"""An engine behind the socket of engine processes, without a process of its own."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from service.backends.local import LocalBackend
from service.backends.process.backend import EngineIndex, ProcessBackend
from service.backends.process.devices import DevicesBackend
from service.backends.process.server import EngineServer


@contextlib.asynccontextmanager
async def engine_socket(engine: LocalBackend) -> AsyncIterator[Path]:
    """The path of its socket while it is served."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as sock:
        path = Path(directory) / "engine.sock"
        sock.bind(str(path))
        sock.listen()
        await engine.start()
        server = EngineServer(engine)
        await server.serve(sock)
        try:
            yield path
        finally:
            await engine.stop()
            await server.stop()


@contextlib.asynccontextmanager
async def engine_backends(*engines: LocalBackend) -> AsyncIterator[list[ProcessBackend]]:
    """A gateway's backend on each of them, not started."""
    async with contextlib.AsyncExitStack() as stack:
        paths = [await stack.enter_async_context(engine_socket(engine)) for engine in engines]
        yield [ProcessBackend(path, index=EngineIndex(index, len(paths))) for index, path in enumerate(paths)]


@contextlib.asynccontextmanager
async def devices_backend(*engines: LocalBackend) -> AsyncIterator[DevicesBackend]:
    """A gateway's backend on all of them, started."""
    async with engine_backends(*engines) as backends:
        backend = DevicesBackend([("cpu", one) for one in backends])
        await backend.start()
        try:
            yield backend
        finally:
            await backend.stop()


@contextlib.asynccontextmanager
async def process_backend(engine: LocalBackend) -> AsyncIterator[ProcessBackend]:
    """A gateway's backend on it, started."""
    async with engine_socket(engine) as path:
        backend = ProcessBackend(path)
        await backend.start()
        try:
            yield backend
        finally:
            await backend.stop()
