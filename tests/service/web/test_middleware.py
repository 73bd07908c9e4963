from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.web.middleware import FREE_BODY_BYTES, MAX_LARGE_BODIES, Body, BodyMemory, logfmt
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway, until
from tests.support.held_time import held_time
from tests.support.raw_http import RawClient, connect, head

PATH = "/v1/completions"


# ---- HEAD ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/health/live", "/v1/models", "/metrics", "/", "/v1/nothing"])
async def test_head_is_answered_like_get_without_a_body(path: str) -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        expected, answer = await server.client.get(path), await server.client.head(path)
        assert answer.content == b""
        assert answer.status_code == expected.status_code
        assert answer.headers["content-type"] == expected.headers["content-type"]


async def test_head_is_refused_where_get_is() -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.head(PATH)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "path", ["/", "/playground", "/playground/app.js", "/health", "/docs", "/v1/sessions/s1/states"]
)
async def test_allow_names_head_beside_get(path: str) -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.post(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


# ---- leaving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_S6_a_client_that_leaves_a_stream_stops_the_generation(num_choices: int) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        await client.post(PATH, {"prompt": "x", "stream": True, "n": num_choices})
        backend.release(num_choices)
        await client.read_until(b'"text":"It"')
        assert len(backend.running) == num_choices
        client.leave()
        await until(lambda: not backend.running)
        assert backend.num_cancels == num_choices
        await until(lambda: _ended(server, "abort") + _ended(server, "abort_before_first_token") == num_choices)
        assert server.metric("nsm_num_requests_running") == 0
        assert _ended(server, "abort") == server.metric("nsm_time_to_first_token_seconds_count")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_S7_a_client_that_leaves_without_streaming_stops_the_generation(path: str) -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        start = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
        await client.post(path, {**start, "n": 2})
        await until(lambda: len(backend.running) == 2)
        client.leave()
        await until(lambda: not backend.running)
        await until(lambda: _ended(server, "abort_before_first_token") == 2)
        await until(lambda: server.metric("nsm_http_requests_total", method="POST", route=path, status="499") == 1)


async def test_S6_a_client_that_leaves_before_the_first_token_stops_the_generation() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        await client.post(PATH, {"prompt": "x", "stream": True})
        await asyncio.wait_for(backend.held.wait(), 60)
        client.leave()
        await until(lambda: not backend.running)
        await until(lambda: _ended(server, "abort_before_first_token") == 1)
        assert server.metric("nsm_time_to_first_token_seconds_count") == 0


async def test_a_client_that_leaves_does_not_disturb_the_others() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, connect(server.url) as leaver:
        await leaver.post(PATH, {"prompt": "x", "stream": True})
        await until(lambda: len(backend.running) == 1)
        stayer = asyncio.create_task(server.client.post(PATH, json={"prompt": "y", "max_tokens": 3}))
        await until(lambda: len(backend.running) == 2)
        leaver.leave()
        await until(lambda: len(backend.running) == 1)
        backend.release_all()
        backend.release(3)
        assert (await stayer).json()["choices"][0]["text"] == "It was the"


async def test_a_client_that_leaves_while_it_sends_its_body_is_nobodys_request() -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        await client.send(head("POST", PATH, {"content-length": "100", "content-type": "application/json"}) + b'{"pro')
        client.leave()
        await until(lambda: server.metric("nsm_http_requests_total", method="POST", route=PATH, status="499") == 1)
    assert backend.requests == []


async def test_one_connection_serves_one_request_after_the_other() -> None:
    """The watch for a client that leaves must take nothing of the next request."""
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        for number in range(5):
            is_stream = number % 2 == 0
            await client.post(PATH, {"prompt": "x", "max_tokens": 1, "stream": is_stream})
            assert await client.status() == 200
            if is_stream:
                await client.read_until(b"data: [DONE]\n\n")
                await client.read_until(b"0\r\n\r\n")
            else:
                await client.read_until(b"}}}")
        # two at once: the second waits in the first one's receive buffer
        raw = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        fields = {"content-length": str(len(raw)), "content-type": "application/json"}
        await client.send((head("POST", PATH, fields) + raw) * 2)
        for _ in range(2):
            assert await client.status() == 200
            await client.read_until(b"}}}")
    assert len(backend.requests) == 7
    assert backend.num_cancels == 0


def _ended(server: Gateway, reason: str) -> float:
    return server.metric("nsm_request_success_total", finished_reason=reason)


async def test_clean_up_after_the_last_byte_is_not_cancelled() -> None:
    """Servers say "disconnect" when the answer is complete; what an application still does then is its own."""
    has_cleaned_up = False
    complete = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal has_cleaned_up
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        for _ in range(5):
            await asyncio.sleep(0)
        has_cleaned_up = True

    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await complete.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            complete.set()

    await Body(application, max_bytes=10, piece_s=10.0, whole_s=10.0)({"type": "http", "headers": []}, receive, send)
    assert has_cleaned_up


async def test_when_the_server_gives_a_request_up_the_work_below_is_cancelled() -> None:
    was_cancelled = asyncio.Event()
    is_running = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        is_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[func-returns-value,return-value]

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent")

    body = Body(application, max_bytes=10, piece_s=10.0, whole_s=10.0)
    task = asyncio.create_task(body({"type": "http", "headers": []}, receive, send))
    await is_running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert was_cancelled.is_set()


# ---- bodies --------------------------------------------------------------------------------------------------------


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async with gateway(FakeBackend(), is_live=True, max_body_bytes=1000) as server, connect(server.url) as client:
        await client.send(head("POST", PATH, {"content-length": "1001", "content-type": "application/json"}))
        assert await client.status() == 413  # not one byte of the body was sent
        error = json.loads(await client.read_until(b"}}"))["error"]
        assert error["code"] == "body_too_large"
        assert "1000" in error["message"]
        assert "1001" in error["message"]


async def test_a_chunked_body_over_the_limit_is_refused_as_soon_as_it_is_over() -> None:
    async with gateway(FakeBackend(), is_live=True, max_body_bytes=1000) as server, connect(server.url) as client:
        fields = {"transfer-encoding": "chunked", "content-type": "application/json"}
        await client.send(head("POST", PATH, fields))
        for _ in range(3):
            await client.send(b"190\r\n" + b"x" * 400 + b"\r\n")  # and no end
        assert await client.status() == 413
        good = await server.client.post(PATH, json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


@pytest.mark.parametrize("length", ["9" * 30, "1000000000"])
async def test_absurd_lengths_are_refused(length: str) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, connect(server.url) as client:
        await client.send(head("POST", PATH, {"content-length": length, "content-type": "application/json"}))
        assert await client.status() in (400, 413)
        assert (await server.client.get("/health")).status_code == 200


async def test_the_limit_itself_is_allowed() -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    async with gateway(FakeBackend(), max_body_bytes=len(body)) as server:
        headers = {"content-type": "application/json"}
        assert (await server.client.post(PATH, content=body, headers=headers)).status_code == 200
        assert (await server.client.post(PATH, content=body + b" ", headers=headers)).status_code == 413


async def test_a_body_in_many_pieces_is_read_whole() -> None:
    async def pieces() -> Any:
        for byte in json.dumps({"prompt": "x", "max_tokens": 2}).encode():
            yield bytes([byte])

    async with gateway(FakeBackend(), is_live=True) as server:
        answer = await server.client.post(PATH, content=pieces(), headers={"content-type": "application/json"})
        assert answer.json()["choices"][0]["text"] == "It was"


@pytest.mark.parametrize("limits", [{"receive_timeout_s": 0.05}, {"request_timeout_s": 0.05}])
async def test_a_body_that_stops_is_408_and_the_connection_is_closed(limits: dict[str, float]) -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True, **limits) as server, connect(server.url) as client:
        await client.send(head("POST", PATH, {"content-length": "100", "content-type": "application/json"}) + b'{"pro')
        assert await client.status() == 408
        error = json.loads(await _read_to_end(client))["error"]
        assert (error["code"], error["type"]) == ("request_timeout", "invalid_request_error")
        assert "after 5 bytes" in error["message"]
    assert backend.requests == []


async def test_slow_body_without_a_long_pause_is_read() -> None:
    receive_timeout_s = 10.0
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    starting = gateway(FakeBackend(), is_live=True, receive_timeout_s=receive_timeout_s)
    async with starting as server, connect(server.url) as client:
        fields = {"content-length": str(len(body)), "content-type": "application/json"}
        with held_time() as passing:
            await client.send(head("POST", PATH, fields))
            for byte in range(0, len(body), 3):
                await client.send(body[byte : byte + 3])
                await passing.advance(receive_timeout_s / 4)
            assert await client.status() == 200


# ---- ids and logs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "0123456789abcdef/x+y=", "a" * 128])
async def test_valid_request_id_is_returned(given: str) -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.get("/health", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "with space", 'quote"', "é"])
async def test_a_bad_request_id_is_replaced(given: str) -> None:
    async with gateway(FakeBackend()) as server:
        headers = {"x-request-id": given.encode()}
        answers = [await server.client.get("/nothing", headers=headers) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(request_id.startswith("req_") for request_id in ids)
    assert ids[0] != ids[1]
    assert error_of(answers[0])["code"] == "not_found"


async def test_the_access_log_has_one_line_for_each_request_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nsm")
    async with gateway(FakeBackend()) as server:
        headers = {"x-request-id": "my-id"}
        await server.client.post(PATH, json={"prompt": "a secret plan"}, headers=headers)
        await server.client.get("/a%0Ab?token=hidden")
    lines = [record.getMessage() for record in caplog.records if record.name == "nsm.access"]
    assert len(lines) == 2
    assert lines[0].startswith("request_id=my-id method=POST path=/v1/completions status=200 duration_ms=")
    assert r'path="/a\nb" status=404' in lines[1]
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


def test_logfmt_quotes_values_that_would_break_a_line() -> None:
    assert logfmt({"a": 1, "b": "x y", "c": "", "d": 'q"', "e": "z=1"}) == 'a=1 b="x y" c="" d="q\\"" e="z=1"'


async def test_an_answer_that_breaks_off_is_seen_as_broken_off() -> None:
    """After the status is out nothing can be said any more but by closing the connection."""
    async with gateway(FakeBackend(), is_live=True) as server:

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ValueError("broken")

        server.app.mount("/broken", broken)
        async with connect(server.url) as client:
            await client.send(head("GET", "/broken/", {}))
            assert await client.status() == 200
            assert await _read_to_end(client) == b"half"
        assert (await server.client.get("/health")).status_code == 200


async def _read_to_end(client: RawClient) -> bytes:
    return await asyncio.wait_for(client.reader.read(), 60)


async def test_X3_held_bodies_have_a_bound_in_all_and_small_ones_still_get_through() -> None:
    size = 200_000
    counted = size - 1 - FREE_BODY_BYTES  # of each body, whose last byte does not come
    most = MAX_LARGE_BODIES * size // counted
    async with (
        gateway(FakeBackend(), is_live=True, max_body_bytes=size) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connect(server.url)) for _ in range(most + 5)]
        memory = body_memory(server)
        start = head("POST", PATH, {"content-length": str(size), "content-type": "application/json"})
        for client in clients[:most]:
            await client.send(start + b"x" * (size - 1))
        await until(lambda: memory.num_held == most * counted)
        for client in clients[most:]:
            await client.send(start + b"x" * (size - 1))
            assert await client.status() == 503
        assert (await server.client.post(PATH, json={"prompt": "x", "max_tokens": 1})).status_code == 200
        assert memory.num_held <= memory.max_bytes
        for client in clients:
            client.leave()
        await until(lambda: memory.num_held == 0)
        body = {"prompt": "x" * (size - 1000), "max_tokens": 1}
        assert (await server.client.post(PATH, json=body)).status_code != 503


def body_memory(server: Gateway) -> BodyMemory:
    app: Any = server.app.middleware_stack
    while not isinstance(app, Body):
        app = app.app
    return app.memory


async def test_X23_a_body_that_is_too_large_counts_for_its_route() -> None:
    async with gateway(FakeBackend(), max_body_bytes=1000) as server:
        assert (await server.client.post(PATH, json={"prompt": "x" * 2000})).status_code == 413
        assert server.metric("nsm_http_requests_total", method="POST", route=PATH, status="413") == 1
