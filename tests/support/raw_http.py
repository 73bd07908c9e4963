"""HTTP by hand, on a socket that a test may close whenever it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """A whole request; the answer is not read."""
        raw = json.dumps(body).encode()
        await self.send(head("POST", path, {"content-length": str(len(raw)), "content-type": "application/json"}) + raw)

    async def read_until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 60)

    async def status(self) -> int:
        """The status of the answer, whose head is read whole."""
        return int((await self.read_until(b"\r\n\r\n")).split()[1])

    def leave(self) -> None:
        """Close without a word, as a client that is killed does."""
        self.writer.transport.abort()


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[RawClient]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
