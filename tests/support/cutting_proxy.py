"""A TCP proxy whose connections can be cut in the middle, like a network that goes away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

CHUNK_BYTES = 64 * 1024


class CuttingProxy:
    """In front of 127.0.0.1:`port`, from `async with` on."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_away = False  # new connections are refused
        self.num_cut = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def lead_to(self, port: int) -> None:
        """Where new connections go from now on."""
        self._server_port = port

    def cut(self) -> None:
        """Every connection that is open ends now, without a word."""
        for writer in tuple(self._writers):
            writer.transport.abort()
            self.num_cut += 1

    async def __aenter__(self) -> CuttingProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_away:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers.add(writer)
        answers = asyncio.create_task(_copy(server_reader, writer))
        try:
            await _copy(reader, server_writer)
        finally:
            self._writers.discard(writer)
            answers.cancel()
            server_writer.close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
