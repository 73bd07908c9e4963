"""A minimal HTTP client for benchmarks: one request per connection, server-sent events straight from the socket.

It does little work per event, because it shares the machine with the measured server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

from nsm_core.errors import ConfigError, NsmError

CONNECT_S = 10.0
SILENCE_S = 300.0  # a slow model reads a long prompt


class Endpoint:
    """An OpenAI-compatible server. `url`: with or without `/v1` at its end."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Raises ConfigError."""
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL must be http://HOST or https://HOST, got {url!r}")
        self.url = parts.geturl()
        self._host, self._path = parts.hostname, parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._ssl is None else 443)
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\n"
        if api_key is not None:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event, up to `[DONE]`. Raises NsmError for any other answer."""
        reader, writer = await self._ask("POST", path, body)
        try:
            await self._require_ok(reader, path)
            while line := await _within(reader.readline(), SILENCE_S, path):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data:"):  # other lines are chunk sizes, comments or event names
                    yield _event(line, path)
            raise NsmError(f"{path}: the stream ended without [DONE]")
        finally:
            writer.close()

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a whole answer. Raises NsmError unless the status is 2xx."""
        reader, writer = await self._ask(method, path, body)
        try:
            chunked = await self._require_ok(reader, path)
            raw = await _within(reader.read(), SILENCE_S, path)
            return json.loads(_unchunked(raw) if chunked else raw)
        except ValueError as error:
            raise NsmError(f"{path}: the answer is not JSON: {error}") from error
        finally:
            writer.close()

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = b"" if body is None else json.dumps(body).encode()
        connecting = asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=2**22)
        reader, writer = await _within(connecting, CONNECT_S, self.url)
        kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
        writer.write(f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + raw)
        return reader, writer

    async def _require_ok(self, reader: asyncio.StreamReader, path: str) -> bool:
        """Reads the head; returns whether the body is chunked."""
        head = await _within(reader.readuntil(b"\r\n\r\n"), SILENCE_S, path)
        status = head.split(b" ", 2)[1]
        if not status.startswith(b"2"):
            answer = (await _within(reader.read(2000), SILENCE_S, path)).decode("utf-8", "replace")
            raise NsmError(f"{path}: status {status.decode()}: {' '.join(answer.split())[:300]}")
        return b"transfer-encoding: chunked" in head.lower()


async def _within(work: Any, seconds: float, label: str) -> Any:
    """Awaits `work`. Raises NsmError that begins with `label` on a timeout or a broken connection."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise NsmError(f"{label}: no answer within {seconds:g} s") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise NsmError(f"{label}: {error}") from error


def _event(line: bytes, path: str) -> dict[str, Any]:
    try:
        event = json.loads(line[5:])
    except ValueError as error:
        raise NsmError(f"{path}: an event is not JSON: {line[:200]!r}") from error
    if not isinstance(event, dict) or "error" in event:
        raise NsmError(f"{path}: the stream failed: {event}")
    return event


def _unchunked(raw: bytes) -> bytes:
    """Joins the chunks of a body."""
    parts = []
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        number = int(size.split(b";")[0], 16)
        parts.append(rest[:number])
        raw = rest[number + 2 :] if number else b""
    return b"".join(parts)
