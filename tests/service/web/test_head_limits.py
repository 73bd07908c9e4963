"""Connections on which no request comes to be, or one that has no end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from service.web.connection import connection_class
from service.web.head_limits import MAX_HEAD_BYTES
from tests.support.held_time import HeldTime, held_time
from tests.support.live_server import serving
from tests.support.raw_http import RawClient, connect, head

HEAD_S = 1.0
STEP_S = HEAD_S / 10
LATE = 60.0  # a test that waits so long has failed


class Application:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_begun.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def client(application: Application) -> AsyncIterator[RawClient]:
    async with serving(application, http=connection_class(HEAD_S), lifespan="off") as url, connect(url) as opened:
        yield opened


@pytest.fixture
async def passing(client: RawClient) -> AsyncIterator[HeldTime]:
    """The time of the server and of the client."""
    with held_time() as held:
        yield held


async def closed(client: RawClient) -> bytes:
    """What was still to read when the server closed the connection."""
    return await asyncio.wait_for(client.reader.read(), LATE)


async def ask(client: RawClient) -> None:
    await client.send(head("GET", "/", {}))
    assert await client.status() == 200
    assert await client.reader.readexactly(2) == b"ok"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: a\r\nx-more: "])
async def test_missing_head_closes_the_connection(client: RawClient, passing: HeldTime, sent: bytes) -> None:
    await client.send(sent)
    rest, passed_s = await passing.pass_until(closed(client), step_s=STEP_S)
    assert rest == b""
    assert passed_s > HEAD_S - STEP_S


async def test_a_head_in_drips_has_no_more_time_than_one_that_stops(client: RawClient, passing: HeldTime) -> None:
    reading = asyncio.create_task(closed(client))
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in head("GET", "/", {"x-padding": "x" * 200}):
            await client.send(bytes([byte]))
            await passing.advance(STEP_S)
            if reading.done():
                break
            num_sent += 1
        assert await reading == b""
    assert 5 < num_sent < 100


@pytest.mark.parametrize("sent", [b"GET / HT", b"\r\n"])
async def test_the_second_request_of_a_connection_has_no_more_time_than_the_first(
    client: RawClient, passing: HeldTime, sent: bytes
) -> None:
    await ask(client)
    await passing.advance(2 * HEAD_S)  # idle: that is the keep-alive's business
    await ask(client)
    await client.send(sent)
    rest, passed_s = await passing.pass_until(closed(client), step_s=STEP_S)
    assert rest == b""
    assert passed_s < 3 * HEAD_S


async def test_an_answer_may_take_longer(client: RawClient, passing: HeldTime, application: Application) -> None:
    application.may_answer.clear()
    asking = asyncio.create_task(ask(client))
    await application.has_begun.wait()
    await passing.advance(3 * HEAD_S)
    application.may_answer.set()
    await asking


# ---- heads that are too large --------------------------------------------------------------------------------------

CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


async def refusal(client: RawClient) -> dict[str, object]:
    """The error of an answer after which the connection is closed."""
    raw = await closed(client)
    first, _, rest = raw.partition(b"\r\n")
    fields, _, body = rest.partition(b"\r\n\r\n")
    assert b"connection: close" in fields
    assert b"x-content-type-options: nosniff" in fields
    assert re.search(rb"^x-request-id: req_\w+\r?$", fields, re.MULTILINE)
    return {"status": int(first.split()[1]), **json.loads(body)["error"]}


@pytest.fixture
async def patient_client(application: Application) -> AsyncIterator[RawClient]:
    """Of a server that waits long enough for this file's largest heads."""
    async with serving(application, http=connection_class(LATE), lifespan="off") as url, connect(url) as opened:
        yield opened


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nx-one: ", b"GET / HTTP/1.1\r\n", CHUNKED + b"x-trailer: "], ids=str
)
@pytest.mark.parametrize("piece", [b"y" * 1000, b"y: z\r\n" * 100])
async def test_a_head_without_end_closes_the_connection(patient_client: RawClient, start: bytes, piece: bytes) -> None:
    """As one endless line or as endless lines, in the request line, the headers or the trailers."""
    reading = asyncio.create_task(closed(patient_client))
    await patient_client.send(start)
    with contextlib.suppress(ConnectionError):  # what had not been read when it was closed
        while not reading.done():
            await patient_client.send(piece)
            await asyncio.sleep(0)  # `send` alone does not let the answer come in
    assert re.search(rb"HTTP/1\.1 (400|431) .*(invalid_http|head_too_large)", await reading, re.DOTALL)


async def test_a_head_may_have_so_many_bytes_and_no_more(patient_client: RawClient) -> None:
    lines = {"host": "a", "x-padding": "x" * (MAX_HEAD_BYTES - 100)}
    await patient_client.send(head("GET", "/", lines))
    assert await patient_client.status() == 200
    assert await patient_client.reader.readexactly(2) == b"ok"
    await patient_client.send(head("GET", "/", {**lines, "x-more": "x" * 100}))
    error = await refusal(patient_client)
    assert (error["status"], error["code"]) == (431, "head_too_large")
    assert str(MAX_HEAD_BYTES) in str(error["message"])


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x16\x03\x01 this is TLS\r\n\r\n", "method"),
        (b"FETCH / HTTP/1.1\r\n\r\n", "method"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", "Content-Length"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "Duplicate Content-Length"),
        (CHUNKED.removesuffix(b"0\r\n") + b"zz\r\n", "chunk size"),
        (b"GET / HTTP/9.1\r\n\r\n", "version"),
    ],
    ids=str,
)
async def test_invalid_http_gets_the_standard_error_body_and_a_line_in_the_log(
    patient_client: RawClient, raw: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nsm.access"):
        await patient_client.send(raw)
        error = await refusal(patient_client)
    assert "status=400 code=invalid_http" in caplog.text
    assert (error["status"], error["code"]) == (400, "invalid_http")
    message = str(error["message"])
    assert message.startswith("the request is not valid HTTP: ")
    assert reason in message
