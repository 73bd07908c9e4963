from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.types import Message

from nsm_core.engine.request import GenerationRequest
from service.web import middleware, sse
from service.web.sse import DONE, EventStream, TextFrame, frame, until_done
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.raw_http import connect

PINGING = {"state": {"stream_ping_s": 0.001}}


class Wire:
    """What a server does with messages: it takes them when `may_send` is set."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.changed = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.may_send.wait()
        self.messages.append(message)
        self.changed.set()

    async def receive(self) -> Message:
        raise AssertionError("a stream never reads")

    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def until_body(self, ending: bytes) -> None:
        async with asyncio.timeout(60):
            while not self.body().endswith(ending):
                self.changed.clear()
                await self.changed.wait()


def test_a_frame_is_one_event() -> None:
    assert frame({"text": "a\nb é"}) == 'data: {"text":"a\\nb é"}\n\n'.encode()
    assert frame({}, event="x", event_id=7) == b"id: 7\nevent: x\ndata: {}\n\n"


@given(text=st.text(), other=st.text())
def test_a_text_frame_is_the_frame_around_its_text(text: str, other: str) -> None:
    def make(given: str) -> bytes:
        return frame({"id": other, "choices": [{"text": given, "reason": None}], "model": other}, event_id=7)

    assert TextFrame(make)(text) == make(text)


async def test_stream_has_headers_against_buffering_proxies() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        yield DONE

    wire = Wire()
    await EventStream(frames())({}, wire.receive, wire.send)
    headers = dict(wire.messages[0]["headers"])
    assert headers[b"cache-control"] == b"no-store"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert wire.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_silence_is_filled_with_comments() -> None:
    go_on = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await go_on.wait()
        yield b"two"

    wire = Wire()
    task = asyncio.create_task(EventStream(frames())(PINGING, wire.receive, wire.send))
    await wire.until_body(sse.PING)
    go_on.set()
    await task
    assert wire.body().startswith(b"one: ping\n")
    assert wire.body().endswith(b"two")


async def test_X16_stream_without_an_interval_sends_no_comments() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(0.02)  # a silence of many intervals of the other tests
        yield b"two"

    for state in ({"stream_ping_s": 0.0}, {}):
        wire = Wire()
        await EventStream(frames())({"state": state}, wire.receive, wire.send)
        assert wire.body() == b"onetwo"


async def test_X16_silent_stream_gets_comments_at_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "PING_S", 0.01)
    async with gateway(FakeBackend(hold=True), is_live=True) as server:
        body = {"prompt": "x", "max_tokens": 4, "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as answer:
            assert await anext(answer.aiter_text()) == ": ping\n"


async def test_a_stock_client_ignores_comments_between_numbered_events() -> None:
    go_on = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        yield frame({"n": 1}, event="x", event_id=1)
        await go_on.wait()
        yield frame({"n": 2}, event="x", event_id=2)

    wire = Wire()
    task = asyncio.create_task(EventStream(frames())(PINGING, wire.receive, wire.send))
    await wire.until_body(sse.PING)
    go_on.set()
    await task
    assert [event.json() for event in SSEDecoder().iter_bytes(iter([wire.body()]))] == [{"n": 1}, {"n": 2}]


async def test_no_comment_waits_behind_a_slow_reader() -> None:
    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    wire = Wire()
    task = asyncio.create_task(EventStream(frames())(PINGING, wire.receive, wire.send))
    await wire.until_body(b"")
    wire.may_send.clear()
    await asyncio.sleep(0.02)  # many silences, all of them the reader's
    wire.may_send.set()
    await task
    assert wire.body().replace(sse.PING, b"") == b"onetwo"
    assert wire.body().count(sse.PING) <= 1


async def test_leaving_closes_the_generator_also_when_it_never_began() -> None:
    for num_sent in (0, 1):
        closed: list[str] = []

        async def frames(closed: list[str] = closed) -> AsyncGenerator[bytes, None]:
            try:
                yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.append("generator")

        wire = Wire()
        if num_sent == 0:
            wire.may_send.clear()
        stream = EventStream(frames(), on_close=lambda closed=closed: closed.append("on_close"))  # type: ignore[misc]
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        if num_sent:
            await wire.until_body(b"one")
        else:
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert closed == (["generator", "on_close"] if num_sent else ["on_close"])


async def test_S4_an_error_is_one_frame_and_done_follows() -> None:
    async def good_then_bad() -> AsyncGenerator[bytes, None]:
        yield frame({"n": 1})
        raise ValueError("the secret is 42")

    frames = [data async for data in until_done(good_then_bad(), request_id="req_1")]
    assert frames[0] == b'data: {"n":1}\n\n'
    error = json.loads(frames[1].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "req_1" in error["message"]
    assert frames[2:] == [DONE]


async def test_a_slow_reader_holds_up_its_own_stream_only() -> None:
    """A reader that takes nothing: the stream stops making frames when the socket is full, and others go on."""
    size = 200_000
    script = "x" * size
    backend = FakeBackend(script)
    made = 0
    real_submit = backend.submit

    def submit(request: GenerationRequest) -> Any:
        generation = real_submit(request)
        events = generation.events

        async def counted() -> Any:
            nonlocal made
            async for event in events():
                made += 1
                yield event

        generation.events = counted  # type: ignore[method-assign]
        return generation

    backend.submit = submit  # type: ignore[method-assign,assignment]
    async with gateway(backend, is_live=True, max_tokens_limit=size + 1) as server, connect(server.url) as client:
        await client.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": size + 1})
        before = -1
        while not made or made != before:  # until the socket takes no more
            before = made
            await asyncio.sleep(0.05)
        assert 0 < made < size
        other = await server.client.post("/v1/completions", json={"prompt": "y", "max_tokens": 1})
        assert other.json()["choices"][0]["text"] == "x"
        client.leave()
