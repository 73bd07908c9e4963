"""Connections on which no request comes to be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from service.connections import with_head_deadline
from tests.live_server import serving
from tests.raw_http import RawClient, connect, head

HEAD_S = 0.1
LATE = 10.0  # a test that waits so long has failed


class Application:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def client(application: Application) -> AsyncIterator[RawClient]:
    async with serving(application, http=with_head_deadline(HEAD_S), lifespan="off") as url, connect(url) as opened:
        yield opened


async def closed(client: RawClient) -> bytes:
    """What was still to read when the server closed the connection."""
    return await asyncio.wait_for(client.reader.read(), LATE)


async def ask(client: RawClient) -> None:
    await client.send(head("GET", "/", {}))
    assert await client.status() == 200
    assert await client.reader.readexactly(2) == b"ok"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: a\r\nx-more: "])
async def test_a_head_that_does_not_come_closes_the_connection(client: RawClient, sent: bytes) -> None:
    await client.send(sent)
    assert await closed(client) == b""


async def test_a_head_in_drips_has_no_more_time_than_one_that_stops(client: RawClient) -> None:
    async def drip() -> None:
        for byte in head("GET", "/", {"x-padding": "x" * 200}):
            await client.send(bytes([byte]))
            await asyncio.sleep(HEAD_S / 10)

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionError):
        assert await closed(client) == b""
    assert not dripping.done()
    dripping.cancel()


@pytest.mark.parametrize("sent", [b"GET / HT", b"\r\n"])
async def test_the_second_request_of_a_connection_has_no_more_time_than_the_first(
    client: RawClient, sent: bytes
) -> None:
    await ask(client)
    await asyncio.sleep(2 * HEAD_S)  # idle: that is the keep-alive's business
    await ask(client)
    await client.send(sent)
    assert await closed(client) == b""


async def test_an_answer_may_take_longer(client: RawClient, application: Application) -> None:
    application.may_answer.clear()
    asking = asyncio.create_task(ask(client))
    await asyncio.sleep(3 * HEAD_S)
    application.may_answer.set()
    await asking
