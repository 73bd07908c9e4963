"""Responses outlive the server that made them: on SQLite and Redis, on any replica, also when one is lost at work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nsm_core.errors import StoreUnavailable
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway, until
from tests.support.redis_servers import Topology
from tests.support.responses import PATH, counts_of, get, log_of, read_stream, respond, session_ids, stream, text_of

SCRIPT = " It was the best of times"
MakeStore = Callable[[], SessionStore]


@pytest.fixture(
    params=["sqlite", *(pytest.param(name, marks=pytest.mark.redis) for name in ("redis_single", "redis_cluster"))]
)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Stores of one place, each as another process would have it."""
    if request.param == "sqlite":
        return lambda: SqliteSessionStore(tmp_path / "sessions.db")
    topology: Topology = request.getfixturevalue(request.param)
    address = parse_redis_url(topology.own_url())
    return lambda: RedisSessionStore(address)


@contextlib.asynccontextmanager
async def pair(make_store: MakeStore, *backends: FakeBackend, **settings: str) -> AsyncIterator[tuple[Gateway, ...]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [gateway(backend, store=make_store(), lease_s=1.0, **settings) for backend in backends]
        yield tuple([await stack.enter_async_context(server) for server in servers])


async def test_P1_a_chain_and_a_conversation_go_on_after_a_restart(make_store: MakeStore) -> None:
    async with gateway(FakeBackend(SCRIPT), store=make_store()) as server:
        events = await stream(server)
        one = events[-1]["response"]
        name = (await server.client.post("/v1/conversations", json={"metadata": {"k": "v"}})).json()["id"]
        said = await respond(server, "one", conversation=name)
    async with gateway(FakeBackend(SCRIPT), store=make_store()) as server:
        assert await get(server, one["id"]) == one
        assert await read_stream(server, one["id"]) == events
        two = await respond(server, "more", previous_response_id=one["id"])
        assert counts_of(two)[1] > 0
        next_said = await respond(server, "two", conversation=name)
        assert counts_of(next_said)[1] >= counts_of(said)[0]
        items = (await server.client.get(f"/v1/conversations/{name}/items", params={"order": "asc"})).json()["data"]
        texts = [item["content"][0]["text"] for item in items]
        assert texts == ["one", text_of(said), "two", text_of(next_said)]
        for response in (one, two, said, next_said):
            await server.client.delete(f"{PATH}/{response['id']}")
        await server.client.delete(f"/v1/conversations/{name}")
        assert await session_ids(server) == []


async def test_S10_another_replica_streams_polls_and_cancels_what_runs_here(make_store: MakeStore) -> None:
    busy = FakeBackend(SCRIPT, hold=True)
    async with pair(make_store, busy, FakeBackend(SCRIPT)) as (here, there):
        busy.release(2)
        one = await respond(here, background=True)
        await busy.held.wait()
        assert (await get(there, one["id"]))["status"] == "in_progress"
        reading = asyncio.create_task(read_stream(there, one["id"], starting_after=4))
        busy.release(100)
        events = await reading
        assert [event["sequence_number"] for event in events] == list(range(5, 5 + len(events)))
        assert events == await read_stream(here, one["id"], starting_after=4)
        busy.forget_permits()
        two = await respond(here, "more", previous_response_id=one["id"], background=True)
        cancelled = (await there.client.post(f"{PATH}/{two['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert await get(here, two["id"]) == cancelled


async def test_P6_a_response_whose_server_was_lost_is_taken_over_by_whoever_asks(make_store: MakeStore) -> None:
    lost = FakeBackend(SCRIPT, hold=True)
    async with pair(make_store, lost, FakeBackend(SCRIPT)) as (here, there):
        name = (await there.client.post("/v1/conversations", json={})).json()["id"]
        lost.release(2)
        one = await respond(here, "one", background=True, conversation=name)
        await lost.held.wait()
        await here.services.store.close()  # as when its process is gone: it renews nothing and writes nothing
        ended = await poll(there, one["id"])
        assert (ended["status"], text_of(ended)) == ("completed", SCRIPT.strip())
        two = await respond(there, "two", conversation=name)
        assert counts_of(two)[1] > 0
        items = (await there.client.get(f"/v1/conversations/{name}/items", params={"order": "asc"})).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["one", SCRIPT.strip(), "two", SCRIPT.strip()]


async def test_P6_a_turn_that_forgets_a_thought_is_taken_over_with_it_forgotten(make_store: MakeStore) -> None:
    script = ">Hm, who?</think>\nEmma."
    lost = FakeBackend(script, hold=True)
    async with pair(make_store, lost, FakeBackend(script), chat_template="rwkv-think-v1") as (here, there):
        lost.release(100)
        one = await respond(here, "one", max_output_tokens=100)
        lost.forget_permits()
        lost.release(2)
        chained = {"previous_response_id": one["id"], "max_output_tokens": 100}
        two = await respond(here, "two", background=True, **chained)
        await lost.held.wait()
        await here.services.store.close()  # as when its process is gone: it renews nothing and writes nothing
        ended = await poll(there, two["id"])
        assert (ended["status"], text_of(ended)) == ("completed", "Hm, who?Emma.")
        (session_id,) = await session_ids(there)
        text = there.services.backend.tokenizer.decode((await log_of(there, session_id))[1:])
        assert text == f"User: one\n\nAssistant: Emma.\n\nUser: two\n\nAssistant: <think{script}"


async def test_P3_a_response_in_mid_stream_when_its_server_stops_is_read_on_elsewhere(make_store: MakeStore) -> None:
    busy = FakeBackend(SCRIPT, hold=True)
    async with pair(make_store, busy, FakeBackend(SCRIPT)) as (here, there):
        busy.release(2)
        name = (await there.client.post("/v1/conversations", json={})).json()["id"]
        streaming = asyncio.create_task(stream(here, "one", conversation=name))
        await busy.held.wait()
        response_id = next(iter(busy.running))._request.request_id
        await until_stored(there, response_id)
        reading = asyncio.create_task(read_stream(here, response_id))
        await asyncio.sleep(0)
        await here.services.turns.drain(0.0)
        *events, error = await streaming
        assert (error["type"], error["code"]) == ("error", "server_stopping")
        assert error["sequence_number"] == events[-1]["sequence_number"]
        assert (await reading)[-1]["type"] == "error"
        rest = await read_stream(there, response_id, starting_after=error["sequence_number"])
        assert [event["sequence_number"] for event in events + rest] == list(range(len(events) + len(rest)))
        ended = rest[-1]["response"]
        assert (ended["status"], text_of(ended)) == ("completed", SCRIPT.strip())
        assert events + rest == await read_stream(there, response_id)
        two = await respond(there, "two", conversation=name)
        assert counts_of(two)[1] > 0


async def test_P3_whoever_waits_without_a_stream_asks_again_and_its_message_is_read_once(make_store: MakeStore) -> None:
    busy = FakeBackend(SCRIPT, hold=True)
    async with pair(make_store, busy, FakeBackend(SCRIPT)) as (here, there):
        name = (await there.client.post("/v1/conversations", json={})).json()["id"]
        body = {"input": "one", "conversation": name}
        waiting = asyncio.create_task(here.client.post(PATH, json=body))
        keyed = asyncio.create_task(here.client.post(PATH, json={"input": "x"}, headers={"Idempotency-Key": "k"}))
        await until_running(busy, 2)
        await here.services.turns.drain(0.0)
        for answer in (await waiting, await keyed):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await there.client.post(PATH, json=body)).json()["status"] == "completed"
        items = (await there.client.get(f"/v1/conversations/{name}/items", params={"order": "asc"})).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["one", SCRIPT.strip()]
        again = await there.client.post(PATH, json={"input": "x"}, headers={"Idempotency-Key": "k"})
        assert (again.json()["status"], there.metric("nsm_turn_takeover_total")) == ("completed", 1)


async def test_P3_a_turn_that_was_taken_over_ends_for_its_first_client_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a process is stopped past its lease and wakes up again."""
    busy = FakeBackend(SCRIPT, hold=True)
    async with pair(lambda: SqliteSessionStore(tmp_path / "s.db"), busy, FakeBackend(SCRIPT)) as (here, there):
        busy.release(2)
        streaming = asyncio.create_task(stream(here))
        await busy.held.wait()
        response_id = next(iter(busy.running))._request.request_id
        with monkeypatch.context() as asleep:
            asleep.setattr(here.services.store, "renew", _unavailable)
            ended = await poll(there, response_id)
        busy.release_all()
        events = await streaming
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"] == ended == await get(here, response_id)
        assert (ended["status"], text_of(ended)) == ("completed", SCRIPT.strip())


async def _unavailable(*_: object, **__: object) -> None:
    raise StoreUnavailable("away")


async def until_running(backend: FakeBackend, num_requests: int) -> None:
    await until(lambda: len(backend.running) == num_requests)


async def until_stored(server: Gateway, response_id: str) -> None:
    while (await server.client.get(f"{PATH}/{response_id}")).status_code != 200:
        pass


async def poll(server: Gateway, response_id: str) -> dict[str, object]:
    """As clients wait for a response in the background."""
    while True:
        answer = await server.client.get(f"{PATH}/{response_id}")
        if answer.status_code == 200 and answer.json()["status"] != "in_progress":  # 404: not stored yet
            return dict(answer.json())
        await asyncio.sleep(0.05)
