"""A stream whose connection was lost is read on: each frame once, while the turn runs and after it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.stores.sessions.sqlite import SqliteSessionStore
from service.turns.turns import RECORD_TTL_S
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway, without_comments
from tests.support.raw_http import connect
from tests.support.stored_sessions import Clock

PATH = "/v1/sessions/s1/generate"
SCRIPT = "naïve 🦋 日本語 e\u0301nd"  # the tokenizer knows none of these characters: each is several tokens
BODY: dict[str, Any] = {
    "input": "x",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
    "logprobs": 1,
}


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(SCRIPT)) as made:
        await made.client.post("/v1/sessions", json={"id": "s1"})
        yield made


@pytest.fixture
async def held() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(SCRIPT, hold=True), is_live=True) as made:
        await made.client.post("/v1/sessions", json={"id": "s1"})
        yield made


def backend_of(server: Gateway) -> FakeBackend:
    assert isinstance(server.services.backend, FakeBackend)
    return server.services.backend


def parts_of(text: str) -> list[str]:
    """The numbered frames of a stream that ended as it should."""
    *parts, done, rest = without_comments(text).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return parts


def number_of(part: str) -> int:
    return int(part.partition("\n")[0].removeprefix("id: "))


def id_of(text: str) -> str:
    return str(frames_of(text)[0]["id"])


async def read(server: Gateway, stream_id: str, after: int | None = None, **headers: str) -> httpx.Response:
    params = {} if after is None else {"starting_after": after}
    return await server.client.get(f"/v1/streams/{stream_id}", params=params, headers=headers)


async def test_S10_frames_are_numbered_by_their_last_token_and_closing_frames_go_on(server: Gateway) -> None:
    response = await server.client.post(PATH, json=BODY)
    parts = parts_of(response.text)
    numbers = [number_of(part) for part in parts]
    num_tokens = len(backend_of(server).script_ids)
    assert numbers == sorted(set(numbers))
    assert numbers[-2:] == [num_tokens + 2, num_tokens + 3]  # the reason, the usage
    assert max(numbers[:-2]) < num_tokens  # end of text shows nothing
    assert "".join(frame["choices"][0]["text"] for frame in frames_of(response.text)[:-1]) == SCRIPT


async def test_S1_S10_whatever_was_received_the_rest_comes_once(server: Gateway) -> None:
    whole = (await server.client.post(PATH, json=BODY)).text
    parts, stream_id = parts_of(whole), id_of(whole)
    last = number_of(parts[-1])
    for after in range(last + 1):
        expected = [part for part in parts if number_of(part) > after]
        by_query, by_header = (
            await read(server, stream_id, after),
            await read(server, stream_id, 1, **{"last-event-id": str(after)}),  # as event sources ask again
        )
        assert parts_of(by_query.text) == expected
        assert by_header.text == by_query.text
    assert (await read(server, stream_id)).text == whole
    assert server.metric("nsm_stream_resume_total") == 2 * (last + 1) + 1
    for far in (last + 1, 99_999_999_999_999_999, 10**18 - 1):  # behind the end there is nothing, and it is said
        for answer in (
            await read(server, stream_id, far),
            await read(server, stream_id, **{"last-event-id": str(far)}),
        ):
            (error,) = (frame["error"] for frame in frames_of(answer.text))
            assert error["type"] == "invalid_request_error"
            assert f"at most {last}, this stream's last id, got {far}" in error["message"]
    assert (await read(server, stream_id, 10**18)).status_code == 400
    assert (await read(server, stream_id, **{"last-event-id": str(10**18)})).status_code == 400
    assert len(backend_of(server).requests) == 1


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks_until_the_close(held: Gateway) -> None:
    async with connect(held.url) as client:
        body = json.dumps(BODY).encode()
        lines = [f"POST {PATH} HTTP/1.0", "content-type: application/json", f"content-length: {len(body)}"]
        await client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        backend_of(held).release(5)
        start = await client.read_until(b"id: 4\n")
        backend_of(held).release_all()
        answer, _, text = (start + await asyncio.wait_for(client.reader.read(), 60)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer
    assert b"connection: close" in answer
    stream = text.decode()
    assert stream == (await read(held, id_of(stream))).text


async def test_S10_a_running_stream_is_read_on_by_a_client_that_comes_back(held: Gateway) -> None:
    backend = backend_of(held)
    async with connect(held.url) as client:
        await client.post(PATH, BODY)
        backend.release(5)
        start = (await client.read_until(b"id: 4\n")).decode()
        client.leave()
    stream_id = start.partition('"id":"')[2].partition('"')[0]
    reading = asyncio.create_task(read(held, stream_id, 3))
    backend.release_all()
    rest = parts_of((await reading).text)
    assert number_of(rest[0]) >= 4
    whole = parts_of((await read(held, stream_id)).text)
    assert rest == [part for part in whole if number_of(part) > 3]
    assert (await held.client.get("/v1/sessions/s1")).json()["version"] == 1


async def test_a_turn_that_was_not_streamed_may_be_read_as_one(server: Gateway) -> None:
    whole = (await server.client.post(PATH, json={"input": "x", "max_tokens": 6})).json()
    frames = frames_of((await read(server, whole["id"])).text)
    assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["choices"][0]["text"]
    assert frames[-1]["session"] == whole["session"]
    assert "usage" not in frames[-1]


async def test_S4_a_stream_that_failed_says_so_again(held: Gateway) -> None:
    backend = backend_of(held)
    streaming = asyncio.create_task(held.client.post(PATH, json=BODY))
    backend.release(3)
    await backend.held.wait()
    await held.client.post("/v1/sessions/s1/cancel")
    whole = (await streaming).text
    *frames, error = frames_of(whole)
    assert error["error"]["code"] == "turn_cancelled"
    again = await read(held, str(frames[0]["id"]))
    assert frames_of(again.text)[:-1] == frames
    assert frames_of(again.text)[-1]["error"]["code"] == "turn_cancelled"


@pytest.mark.parametrize(
    "stream_id",
    [
        "x",
        "cmpl-0",
        "cmpl-" + "0" * 32,
        "cmpl-" + "0" * 32 + "-s1",
        "cmpl-" + "0" * 32 + "-nobody",
        "cmpl-" + "0" * 32 + "-%20",
    ],
)
async def test_what_is_no_stream_is_404(server: Gateway, stream_id: str) -> None:
    response = await read(server, stream_id)
    assert (response.status_code, error_of(response)["code"]) == (404, "stream_not_found")


async def test_P11_reading_a_state_has_a_metric_of_its_own_and_takes_no_time_to_speak_of(server: Gateway) -> None:
    for _ in range(3):
        await server.client.post(PATH, json=BODY)
    assert server.metric("nsm_state_fetch_seconds_count") == 3
    assert server.metric("nsm_state_fetch_seconds_sum") / 3 < 0.05  # in memory; docs/redis.md has the stores' figures


async def test_P11_any_stream_is_read_on_until_its_ttl_or_its_sessions_end() -> None:
    clock = Clock()
    async with gateway(FakeBackend(SCRIPT), store=SqliteSessionStore(None, clock=clock)) as server:
        ids = []
        for session_id in ("s1", "s2"):
            await server.client.post("/v1/sessions", json={"id": session_id})
            response = await server.client.post(f"/v1/sessions/{session_id}/generate", json=BODY)
            ids.append(id_of(response.text))
        await server.client.delete("/v1/sessions/s1")
        assert [(await read(server, stream_id)).status_code for stream_id in ids] == [404, 200]
        clock.advance(RECORD_TTL_S + 1)
        assert (await read(server, ids[1])).status_code == 404


@pytest.mark.parametrize(
    ("params", "headers", "param"),
    [
        ({"starting_after": "-1"}, {}, "starting_after"),
        ({"starting_after": "x"}, {}, "starting_after"),
        ({}, {"last-event-id": "x"}, "Last-Event-ID"),
        ({}, {"last-event-id": "-1"}, "Last-Event-ID"),
        ({}, {"last-event-id": "9" * 30}, "Last-Event-ID"),
    ],
)
async def test_a_place_that_cannot_be_is_refused(
    server: Gateway, params: dict[str, str], headers: dict[str, str], param: str
) -> None:
    stream_id = id_of((await server.client.post(PATH, json=BODY)).text)
    response = await server.client.get(f"/v1/streams/{stream_id}", params=params, headers=headers)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
