"""Connections to Redis that end at a bad moment: none is left open, whatever was under way."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import pytest

from nsm_core.errors import StoreUnavailable
from service.stores.redis.client import RedisClient, _make_client
from service.stores.redis.url import parse_redis_url

OPENING = 5  # commands of a new connection: HELLO, CLIENT SETNAME, twice CLIENT SETINFO, and the first of ours
ANSWERS = {b"HELLO": b"OK", b"CLIENT": b"OK", b"PING": b"PONG"}


class SlowServer:
    """Answers a GET with its key; holds the answer to command number `hold_at` of a connection until `go_on` is set."""

    def __init__(self, hold_at: int = 0) -> None:
        self.hold_at = hold_at
        self.go_on = asyncio.Event()
        self.is_holding = asyncio.Event()
        self.num_open = 0
        self.num_accepted = 0
        self.all_closed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}?max_connections=1&pool_timeout_s=30"

    async def __aenter__(self) -> SlowServer:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_on.set()
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.num_accepted += 1
        self.all_closed.clear()
        try:
            for number in range(1, 1000):
                parts = await _read_command(reader)
                if number == self.hold_at:
                    self.is_holding.set()
                    await self.go_on.wait()
                writer.write(b"+%s\r\n" % ANSWERS.get(parts[0], parts[-1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.num_open -= 1
            if not self.num_open:
                self.all_closed.set()


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    num_parts, parts = int((await reader.readuntil(b"\r\n"))[1:]), []
    for _ in range(num_parts):
        num_bytes = int((await reader.readuntil(b"\r\n"))[1:])
        parts.append((await reader.readexactly(num_bytes + 2))[:-2])
    return parts


@pytest.fixture
async def server() -> AsyncIterator[SlowServer]:
    gc.collect()  # what earlier tests left is not this test's
    async with SlowServer() as server:
        yield server


def connected(server: SlowServer) -> RedisClient:
    client = RedisClient(parse_redis_url(server.url))
    client.connect()
    return client


async def require_all_closed(server: SlowServer) -> None:
    """By the server's own sight, and without a word from the garbage collector."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    async with asyncio.timeout(60):
        await server.all_closed.wait()
    assert server.num_accepted > 0


@pytest.mark.parametrize("hold_at", range(1, OPENING + 1))
async def test_D1_a_command_under_way_ends_before_its_connections_are_closed(server: SlowServer, hold_at: int) -> None:
    server.hold_at = hold_at
    client = connected(server)
    command = asyncio.create_task(client.command("GET", "k"))
    await server.is_holding.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="not open"):
        await client.command("GET", "k")  # nothing new begins
    assert not closing.done()
    server.go_on.set()
    assert await command == b"k"
    await closing
    del client
    await require_all_closed(server)


@pytest.mark.parametrize("hold_at", range(1, OPENING + 1))
async def test_D1_a_cancelled_command_leaves_no_connection(server: SlowServer, hold_at: int) -> None:
    server.hold_at = hold_at
    client = connected(server)
    command = asyncio.create_task(client.command("GET", "k"))
    await server.is_holding.wait()
    command.cancel()
    server.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await command
    assert await client.command("GET", "other") == b"other"  # not the answer that nobody waited for
    await client.close()
    del client
    await require_all_closed(server)


async def test_D1_a_command_that_waits_for_a_connection_is_refused_when_the_store_closes(server: SlowServer) -> None:
    server.hold_at = OPENING
    client = connected(server)
    first, second = (asyncio.create_task(client.command("GET", "k")) for _ in range(2))
    await server.is_holding.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    server.go_on.set()
    assert await first == b"k"
    with pytest.raises(StoreUnavailable, match="not open"):
        await second
    await closing
    await require_all_closed(server)


async def test_D1_a_close_that_is_cancelled_closes_all_the_same(server: SlowServer) -> None:
    server.hold_at = OPENING
    client = connected(server)
    command = asyncio.create_task(client.command("GET", "k"))
    await server.is_holding.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(StoreUnavailable):
        await command
    server.go_on.set()
    await require_all_closed(server)


async def test_D1_a_sentinel_client_that_fails_to_close_does_not_keep_the_others_open() -> None:
    master, close = _make_client(parse_redis_url("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main"))
    closed: list[str] = []

    def watch(client: Any, name: str, error: Exception | None = None) -> None:
        async def aclose() -> None:
            closed.append(name)
            if error is not None:
                raise error

        client.connection_pool.aclose = aclose

    watch(master, "master", TimeoutError("it hangs"))
    for number, sentinel in enumerate(master.connection_pool.sentinel_manager.sentinels):
        watch(sentinel, f"sentinel {number}")
    with pytest.raises(TimeoutError, match="it hangs"):
        await close()
    assert sorted(set(closed)) == ["master", "sentinel 0", "sentinel 1"]
