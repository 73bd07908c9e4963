"""A TCP proxy that can lose an answer: the server did the work, and the connection broke before the client knew."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

CHUNK_BYTES = 64 * 1024


class LossyProxy:
    """Between one client and 127.0.0.1:`port`, from `async with` on."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._to_lose: bytes | None = None
        self.num_lost = 0

    @property
    def port(self) -> int:
        return int(self._listener.sockets[0].getsockname()[1])

    def lose_answer_to(self, command: bytes) -> None:
        """The next request that holds these bytes reaches the server; its answer goes nowhere."""
        self._to_lose = command

    async def __aenter__(self) -> LossyProxy:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        lose = asyncio.Event()
        answers = asyncio.create_task(self._answer(server_reader, writer, lose))
        try:
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(CHUNK_BYTES):
                    if self._to_lose is not None and self._to_lose in chunk:
                        self._to_lose = None
                        lose.set()
                    server_writer.write(chunk)
            await answers if lose.is_set() else answers.cancel()
        finally:
            server_writer.close()
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lose: asyncio.Event) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if lose.is_set():
                self.num_lost += 1
                writer.transport.abort()
                return
            writer.write(chunk)
