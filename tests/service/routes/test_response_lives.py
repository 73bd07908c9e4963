"""Responses while they run and after: in the background, read again, cancelled, deleted, tried again."""

from __future__ import annotations

import asyncio

import pytest

from nsm_core.errors import Overloaded
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.responses import (
    PATH,
    SCRIPT,
    events_of,
    get,
    read_stream,
    respond,
    session_ids,
    stream,
    text_of,
)
from tests.support.responses import backend as backend
from tests.support.responses import server as server


async def test_a_response_in_the_background_is_polled() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        assert (opened["status"], opened["background"], opened["output"]) == ("in_progress", True, [])
        assert (await get(server, opened["id"]))["status"] == "in_progress"
        answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": opened["id"]})
        assert (answer.status_code, error_of(answer)["code"]) == (409, "session_busy")
        reading = asyncio.create_task(read_stream(server, opened["id"]))
        await backend.held.wait()
        backend.release_all()
        events = await reading
        ended = await get(server, opened["id"])
        assert (ended["status"], text_of(ended)) == ("completed", "It was")
        assert events[-1]["response"] == ended
        assert events == await read_stream(server, opened["id"])


async def test_a_running_response_is_cancelled() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        reading = asyncio.create_task(read_stream(server, opened["id"]))
        await backend.held.wait()
        cancelled = (await server.client.post(f"{PATH}/{opened['id']}/cancel")).json()
        assert (cancelled["status"], cancelled["output"], cancelled["error"]) == ("cancelled", [], None)
        events = await reading
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", cancelled)
        assert await get(server, opened["id"]) == cancelled
        refused = await server.client.post(PATH, json={"input": "x", "previous_response_id": opened["id"]})
        assert f"has an answer; '{opened['id']}' was cancelled" in refused.json()["error"]["message"]
        again = (await server.client.post(f"{PATH}/{opened['id']}/cancel")).json()
        assert again == cancelled
        assert backend.running == set()
        answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": opened["id"]})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "previous_response_id")


async def test_a_response_that_has_ended_stays_as_it_is_when_cancelled(server: Gateway) -> None:
    ended = await respond(server)
    assert (await server.client.post(f"{PATH}/{ended['id']}/cancel")).json() == ended


async def test_a_running_response_that_is_deleted_stops() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        assert (await server.client.delete(f"{PATH}/{opened['id']}")).status_code == 200
        assert backend.running == set()
        assert await session_ids(server) == []


@pytest.mark.parametrize("after", [0, 3, 4, 6, 9, 11])
async def test_S10_a_stream_is_read_on_from_any_event(server: Gateway, after: int) -> None:
    events = await stream(server)
    response_id = events[-1]["response"]["id"]
    assert await read_stream(server, response_id, starting_after=after) == events[after + 1 :]
    answer = await server.client.get(
        f"{PATH}/{response_id}",
        params={"stream": True, "starting_after": 0},  # an event source asks for the same URL again
        headers={"last-event-id": str(after)},
    )
    assert events_of(answer) == events[after + 1 :]


async def test_S10_a_number_behind_a_responses_last_event_is_an_error_in_the_stream(server: Gateway) -> None:
    events = await stream(server)
    last = events[-1]["sequence_number"]
    for far in (last + 1, 10**18 - 1):
        (error,) = await read_stream(server, events[-1]["response"]["id"], starting_after=far)
        assert error["type"] == "error"
        assert f"at most {last}, this stream's last id, got {far}" in error["message"]


async def test_S10_a_client_that_leaves_comes_back_to_its_running_stream() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend, is_live=True) as server:
        body = {"input": "hello", "stream": True}
        async with server.client.stream("POST", PATH, json=body) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("id: 3"):
                pass
        response_id = next(iter(backend.running))._request.request_id
        reading = asyncio.create_task(read_stream(server, response_id, starting_after=3))
        backend.release_all()
        events = await reading
        assert [event["sequence_number"] for event in events] == list(range(4, 4 + len(events)))
        assert text_of(events[-1]["response"]) == "It was"


async def test_an_engine_that_fails_fails_the_response() -> None:
    async with gateway(FakeBackend(SCRIPT, fail_after=2)) as server:
        answer = await server.client.post(PATH, json={"input": "x"})
        assert answer.status_code == 500
        events = await stream(server)
        failed = events[-1]["response"]
        assert events[-1]["type"] == "response.failed"
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": "server_error", "message": "the fake was told to fail"}
        assert events == await read_stream(server, failed["id"])
        free = await stream(server, store=False)
        assert (free[-1]["type"], free[-1]["response"]["status"]) == ("response.failed", "failed")


async def test_a_refused_response_leaves_nothing_behind(server: Gateway, backend: FakeBackend) -> None:
    backend.refusal = Overloaded("the queue is full")
    for body in ({}, {"background": True}, {"store": False}):
        answer = await server.client.post(PATH, json={"input": "x", **body})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
    assert await session_ids(server) == []


async def test_a_retry_with_the_same_key_gets_the_same_response() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        body, headers = {"input": "x"}, {"idempotency-key": "k1"}
        posts = [asyncio.create_task(server.client.post(PATH, json=body, headers=headers)) for _ in range(2)]
        await backend.held.wait()
        backend.release_all()
        first, second = [answer.json() for answer in await asyncio.gather(*posts)]
        assert first == second
        rendering = {"stream": True, "stream_options": {"include_obfuscation": False}}
        third = await server.client.post(PATH, json={**body, **rendering}, headers=headers)
        assert events_of(third)[-1]["response"] == first
        assert len(await session_ids(server)) == 1
        other = await server.client.post(PATH, json={"input": "y"}, headers=headers)
        assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reused")
        bad = await server.client.post(PATH, json=body, headers={"idempotency-key": "a b"})
        assert (bad.status_code, error_of(bad)["param"]) == (400, "Idempotency-Key")


async def test_a_retry_of_a_failed_response_runs_again() -> None:
    backend = FakeBackend(SCRIPT, fail_after=1)
    async with gateway(backend) as server:
        body, headers = {"input": "x"}, {"idempotency-key": "k1"}
        assert (await server.client.post(PATH, json=body, headers=headers)).status_code == 500
        backend.fail_after = None
        again = (await server.client.post(PATH, json=body, headers=headers)).json()
        assert (again["status"], text_of(again)) == ("completed", "It was")
        body, headers = {"input": "y", "previous_response_id": again["id"]}, {"idempotency-key": "k2"}
        backend.fail_after = 1
        assert (await server.client.post(PATH, json=body, headers=headers)).status_code == 500
        backend.fail_after = None
        more = (await server.client.post(PATH, json=body, headers=headers)).json()
        assert (more["status"], text_of(more)) == ("completed", "It was")
        assert await read_stream(server, more["id"]) != []
        for response in (again, more):
            await server.client.delete(f"{PATH}/{response['id']}")
        assert await session_ids(server) == []
