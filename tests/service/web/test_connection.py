"""What one connection may hold, and that every answer can be read, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.generate import starting
from service.generate.choices import RequestGroup
from service.transfer.session_file import SessionFile
from service.web import connection
from service.web.connection import (
    JOINED_BYTES,
    MAX_PIPELINED,
    ClosingTransport,
    Connection,
    DirectWriter,
    connection_class,
)
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.live_server import serving
from tests.support.raw_http import RawClient, connect, head

LATE = 60.0  # a test that waits so long has failed
GET = head("GET", "/x", {})
MB = 1_000_000
NUM_TURNS = 100  # of the loop, in which sockets that can take more do


class Application:
    """Answers without reading a body, when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        reading = asyncio.create_task(self._read(receive)) if scope["path"] == "/read" else None
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no", "more_body": False})
        if reading is not None:
            reading.cancel()

    async def _read(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def url(application: Application) -> AsyncIterator[str]:
    async with serving(application, http=connection_class(LATE), lifespan="off") as opened:
        yield opened
        application.may_answer.set()  # the server waits for its requests


@pytest.fixture
async def client(url: str) -> AsyncIterator[RawClient]:
    async with connect(url) as opened:
        yield opened


async def num_bytes_taken(client: RawClient, data: bytes, at_most: int) -> int:
    """How much of `data`, again and again, the server and the sockets take before they take no more.

    That is when they take nothing in many turns of the loop, however long these are.
    """
    num_bytes = 0
    while num_bytes < at_most:
        sending = asyncio.create_task(client.send(data))
        for _ in range(NUM_TURNS):
            await asyncio.wait((sending,), timeout=0.005)
            if sending.done():
                break
        else:
            sending.cancel()
            break
        await sending
        num_bytes += len(data)
    return num_bytes


async def test_X3_pipelined_requests_that_wait_are_few_and_no_more_is_read(
    client: RawClient, application: Application
) -> None:
    gc.collect()
    older = held_now()  # kept, so that no new object gets the id of one
    taken = await num_bytes_taken(client, GET * 1000, 64 * MB)
    assert taken < 32 * MB  # buffers of two sockets, which the kernel bounds
    earlier = {id(one) for one in older}
    held = [one for one in held_now() if type(one) is RequestResponseCycle and id(one) not in earlier]
    assert len(held) == MAX_PIPELINED + 1
    assert application.num_begun == 1


async def test_X3_held_requests_are_answered_before_the_connection_ends(
    client: RawClient, application: Application
) -> None:
    application.may_answer.set()
    await client.send(GET * 5000)
    answers = await asyncio.wait_for(client.reader.read(), LATE)
    assert answers.count(b"HTTP/1.1 413") == answers.count(b"\r\n\r\nno") == MAX_PIPELINED + 1
    assert answers.count(b"connection: close") == 1


@pytest.mark.parametrize("count", [1, 2, MAX_PIPELINED, MAX_PIPELINED + 1])
async def test_pipelined_requests_within_the_bound_leave_the_connection_open(
    client: RawClient, application: Application, count: int
) -> None:
    application.may_answer.set()
    for _ in range(2):
        await client.send(GET * count)
        for _ in range(count):
            assert await client.status() == 413
            assert await client.reader.readexactly(2) == b"no"


async def test_X3_the_body_of_a_waiting_request_is_not_read_on(client: RawClient, application: Application) -> None:
    await client.send(head("GET", "/read", {}) + head("POST", "/x", {"content-length": str(256 * MB)}))
    assert await num_bytes_taken(client, b"x" * MB, 64 * MB) < 32 * MB
    application.may_answer.set()
    assert await client.status() == 413


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    length = (b"content-length", str(LARGE).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": bytes(LARGE), "more_body": False})


LARGE = 32 * MB  # more than the buffers of two sockets


async def test_X30_of_answers_that_nobody_reads_the_oldest_goes_when_all_are_too_many() -> None:
    protocol = connection_class(LATE, max_unread_bytes=3 * LARGE)
    async with serving(large, http=protocol, lifespan="off") as url, contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(8):
            client = await stack.enter_async_context(connect(url))
            await client.send(GET)
            assert await client.status() == 200  # its answer is written, and most of it waits
            clients.append(client)
        oldest, newest = clients[0], clients[-1]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(oldest.reader.readexactly(LARGE), LATE)
        assert len(await asyncio.wait_for(newest.reader.readexactly(LARGE), LATE)) == LARGE


async def in_two_parts(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for is_last in (False, True):
        await send({"type": "http.response.body", "body": bytes(LARGE), "more_body": not is_last})


async def test_X30_a_part_that_waits_for_another_counts_as_unread() -> None:
    protocol = connection_class(LATE, max_unread_bytes=3 * LARGE)  # less than two answers, more than their first parts
    async with serving(in_two_parts, http=protocol, lifespan="off") as url, connect(url) as first, connect(url) as last:
        for client in (first, last):
            await client.send(GET)
            assert await client.status() == 200
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(first.reader.readexactly(2 * LARGE), LATE)
        assert len(await asyncio.wait_for(last.reader.readexactly(2 * LARGE), LATE)) == 2 * LARGE


async def test_X30_the_memory_of_a_large_answer_goes_back_when_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, has_trimmed = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(connection, "trim_heap", lambda: loop.call_soon_threadsafe(has_trimmed.set))
    async with serving(large, http=connection_class(LATE), lifespan="off") as url:
        async with connect(url) as client:
            await client.send(GET)
            assert await client.status() == 200
        await asyncio.wait_for(has_trimmed.wait(), LATE)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Of garbage, after that of earlier tests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


HELD = (Connection, RequestResponseCycle, DirectWriter, RequestGroup)


def held_now() -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, HELD)]


def ends_of_held(earlier: set[int]) -> list[asyncio.Event]:
    """Set when the objects that connections and their requests hold now are gone; `earlier` are ids of older ones.

    Errors that are parameters of other tests keep their tracebacks, and these the requests that met them.
    """
    ends = []
    for held in [one for one in held_now() if id(one) not in earlier]:
        ends.append(asyncio.Event())
        weakref.finalize(held, ends[-1].set)
    return ends


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_X30_what_a_stream_held_goes_with_its_client_and_without_a_collection(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_large(file: SessionFile) -> bytes:
        return bytes(LARGE)

    monkeypatch.setattr(starting, "encode_file", encode_large)
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x", "store": False},
    }
    older = held_now()  # kept, so that no new object gets the id of one
    async with gateway(FakeBackend(), is_live=True) as server:
        async with connect(server.url) as client:
            await client.post(path, {**asked[path], "stream": True, "return_state": True})
            await client.read_until(b'"num_bytes":')  # of the state, whose data wait for the client
            ends = ends_of_held({id(one) for one in older})
        assert len(ends) == len(HELD)
        for end in ends:
            await asyncio.wait_for(end.wait(), LATE)


@pytest.mark.parametrize("size", [100, 8_400_000])
async def test_X7_an_answer_before_the_body_was_read_reaches_a_client_that_closes(
    url: str, application: Application, size: int
) -> None:
    application.may_answer.set()

    def post() -> tuple[int, bytes]:
        """urllib sends the whole body before it reads, with `Connection: close`."""
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/x", b"x" * size)) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    for _ in range(5):
        assert await asyncio.to_thread(post) == (413, b"no")


async def test_X7_a_refused_head_can_be_read_while_the_client_still_sends(client: RawClient) -> None:
    await client.send(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"x" * 4 * MB)
    assert await client.status() == 431


async def test_X7_a_client_that_sends_for_ever_is_closed(
    client: RawClient, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    application.may_answer.set()
    await client.send(head("POST", "/x", {"content-length": str(256 * MB), "connection": "close"}))
    assert await client.status() == 413

    async def send_on() -> None:
        while True:
            await client.send(b"x" * 1000)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_on(), LATE)


class HeldUp(Connection):
    """The event loop has something else to do between a request's head and the application."""

    head_s = LATE
    hold_s = 0.2

    def on_headers_complete(self) -> None:
        time.sleep(self.hold_s)
        super().on_headers_complete()


async def test_X27_the_time_to_the_first_token_has_the_wait_before_the_application() -> None:
    async with (
        gateway(FakeBackend()) as server,
        serving(server.app, http=HeldUp, lifespan="off") as url,
        httpx.AsyncClient(base_url=url, timeout=LATE) as client,
    ):
        for is_stream in (False, True):
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": is_stream})
            assert answer.status_code == 200
        assert server.metric("nsm_time_to_first_token_seconds_sum") >= 2 * HeldUp.hold_s
        assert server.metric("nsm_e2e_request_latency_seconds_sum") >= 2 * HeldUp.hold_s


async def test_X27_each_request_of_a_connection_has_its_own_arrival() -> None:
    async with (
        gateway(FakeBackend()) as server,
        serving(server.app, http=connection_class(LATE), lifespan="off") as url,
        httpx.AsyncClient(base_url=url, timeout=LATE) as client,
    ):
        await client.get("/health/live")
        await asyncio.sleep(0.2)  # the client's own pause does not count
        asked_at = time.monotonic()
        assert (await client.post("/v1/completions", json={"prompt": "x", "stream": True})).status_code == 200
        assert 0 < server.metric("nsm_time_to_first_token_seconds_sum") < time.monotonic() - asked_at


class Written:
    """A transport that keeps what it was given."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(bytes(data))


async def test_short_writes_of_one_turn_go_out_together_and_in_order() -> None:
    socket, owner = Written(), Connection.__new__(Connection)
    owner.loop = asyncio.get_running_loop()
    transport = ClosingTransport(socket, owner)  # type: ignore[arg-type]  # as far as writes go
    for part in (b"head", b"body"):
        transport.write(part)
    assert socket.parts == []
    await asyncio.sleep(0)
    assert socket.parts == [b"headbody"]
    large = b"x" * (JOINED_BYTES + 1)
    for part in (b"1", large, b"2", b"3"):
        transport.write(part)
    assert socket.parts[1:] == [b"1", large]  # it waits for nothing
    transport.flush()
    await asyncio.sleep(0)
    assert socket.parts[3:] == [b"23"]
