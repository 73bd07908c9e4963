"""Ambiguous HTTP messages, to the server itself and through proxies: no bytes of a body are ever read as a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from service.web.connection import connection_class
from tests.deploy.native_services import proxy_service
from tests.support.counts import scaled
from tests.support.gateway import until
from tests.support.haproxy import SERVER, haproxy
from tests.support.live_server import serving
from tests.support.raw_http import connect

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /open HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"0\r\n\r\n" + HIDDEN


def sized(*lines: bytes, body: bytes) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LATE = 60.0  # seconds; a test that waits so long has failed
NUM_REQUESTS = scaled(60, 3_000)
LENGTH = b"Content-Length: %d" % len(CHUNKED)
MESSAGES = {
    "a length and chunks": sized(LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED),
    "chunks and a length": sized(b"Transfer-Encoding: chunked", LENGTH, body=CHUNKED),
    "an unknown coding": sized(LENGTH, b"Transfer-Encoding: xchunked", body=CHUNKED),
    "a space before the colon": sized(LENGTH, b"Transfer-Encoding : chunked", body=CHUNKED),
    "a tab": sized(LENGTH, b"Transfer-Encoding:\tchunked", body=CHUNKED),
    "chunked is not the last coding": sized(LENGTH, b"Transfer-Encoding: chunked, identity", body=CHUNKED),
    "chunked twice": sized(LENGTH, b"Transfer-Encoding: chunked, chunked", body=CHUNKED),
    "two codings": sized(LENGTH, b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", body=CHUNKED),
    "two lengths": sized(LENGTH, b"Content-Length: 0", body=CHUNKED),
    "two lengths, zero first": sized(b"Content-Length: 0", LENGTH, body=CHUNKED),
    "a list of lengths": sized(b"Content-Length: 0, %d" % len(CHUNKED), body=CHUNKED),
    "a length with a sign": sized(b"Content-Length: +0", body=HIDDEN),
    "a length in hexadecimal digits": sized(b"Content-Length: 0x0", body=HIDDEN),
    "a negative length": sized(b"Content-Length: -1", body=HIDDEN),
    "an empty length": sized(b"Content-Length:", body=HIDDEN),
    "a length of many digits": sized(b"Content-Length: " + b"0" * 40 + b"99999999999999999999999", body=HIDDEN),
    "a folded length": sized(b"X-A: b", b" Content-Length: 0", LENGTH, body=CHUNKED),
    "a folded coding": sized(LENGTH, b"Transfer-Encoding:", b" chunked", body=CHUNKED),
    "lines that end in LF": (sized(LENGTH, body=b"")[:-2] + b"\n").replace(b"\r\n", b"\n") + CHUNKED,
    "a coding behind a bare LF": sized(LENGTH, b"X-A: b\nTransfer-Encoding: chunked", body=CHUNKED),
    "a coding behind a bare CR": sized(LENGTH, b"X-A: b\rTransfer-Encoding: chunked", body=CHUNKED),
    "a coding behind a NUL": sized(LENGTH, b"X-A: b\0Transfer-Encoding: chunked", body=CHUNKED),
    "a chunk size that overflows": sized(b"Transfer-Encoding: chunked", body=b"10000000000000000\r\n\r\n" + CHUNKED),
    "a chunk size with a sign": sized(b"Transfer-Encoding: chunked", body=b"+0\r\n\r\n" + HIDDEN),
    "a chunk that is longer than its size": sized(b"Transfer-Encoding: chunked", body=b"1\r\nab\r\n" + CHUNKED),
    "a chunk that ends in LF": sized(b"Transfer-Encoding: chunked", body=b"1\na\n0\n\n" + HIDDEN),
    "an extension of a chunk with LF": sized(b"Transfer-Encoding: chunked", body=b"0;a\nb\r\n\r\n" + HIDDEN),
    "chunks in HTTP/1.0": sized(LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED).replace(b"1.1", b"1.0", 1),
}


class Application:
    """Answers each request with its target, after it has read the body; `/early` without reading any of it."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        body = scope["path"].encode() + b"?" + scope["query_string"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def url(application: Application) -> AsyncIterator[str]:
    async with serving(application, http=connection_class(LATE), lifespan="off") as opened:
        yield opened


@dataclasses.dataclass(frozen=True)
class Proxy:
    """`sent`: the paths of the requests that it passed on, by its log."""

    url: str
    sent: Callable[[], list[str]]


@contextlib.contextmanager
def nginx_proxy(directory: Path, address: str) -> Iterator[Proxy]:
    with proxy_service(directory, [address]) as started:
        yield Proxy(started.url, lambda: [str(line["path"]) for line in started.asked() if line["gateway"]])


@contextlib.contextmanager
def haproxy_proxy(directory: Path, address: str) -> Iterator[Proxy]:
    with haproxy(directory, address) as started:
        yield Proxy(started.url, lambda: [path for server, path in started.asked() if server == SERVER])


@pytest.fixture(
    params=[
        pytest.param(nginx_proxy, id="nginx", marks=pytest.mark.nginx),
        pytest.param(haproxy_proxy, id="haproxy", marks=pytest.mark.haproxy),
    ]
)
def proxy(request: pytest.FixtureRequest, application: Application, url: str, tmp_path: Path) -> Iterator[Proxy]:
    with request.param(tmp_path / "proxy", url.removeprefix("http://")) as started:
        yield started


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
async def test_an_ambiguous_message_is_refused_and_ends_its_connection(
    application: Application, url: str, message: bytes
) -> None:
    async with connect(url) as client, asyncio.timeout(LATE / 2):
        await client.send(message)
        answer = await client.reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert "/hidden" not in application.paths


async def test_a_proxy_and_the_server_agree_on_where_each_message_ends(application: Application, proxy: Proxy) -> None:
    """Each request that reaches the application is one that the proxy sent; a line of its log may come late. HAProxy
    passes on some that the server then refuses.
    """
    for message in MESSAGES.values():
        before = len(proxy.sent())
        application.paths.clear()
        async with connect(proxy.url) as client:
            await client.send(message + LAST)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(LATE):
                    await client.reader.read()
        await until(lambda: not Counter(application.paths) - Counter(proxy.sent()[before:]))  # noqa: B023


async def test_answers_before_the_body_do_not_mix_up_the_connections_that_a_proxy_keeps(proxy: Proxy) -> None:
    limits = httpx.Limits(max_connections=16)
    timeout = httpx.Timeout(LATE, pool=None)  # all requests but 16 wait for a connection
    async with httpx.AsyncClient(base_url=proxy.url, timeout=timeout, limits=limits) as client:

        async def ask(number: int) -> None:
            target = f"/early?{number}" if number % 3 == 0 else f"/read?{number}"
            body = b"x" * (3_000_000 if number % 2 == 0 else 10)
            answer = await client.post(target, content=body)
            assert (answer.status_code, answer.text) == (200, target)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                group.create_task(ask(number))
