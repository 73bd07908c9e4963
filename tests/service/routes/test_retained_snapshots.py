"""Going back from the nearest older snapshot: what is read again, and that nothing else tells the difference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from nsm_core.engine.request import GenerationRequest
from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.migrate import Migrator
from service.turns.lease import Leases
from tests.service.routes.test_session_rewind import KEY, create, log_of, ok, rewind, say, snapshot_of
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, gateway
from tests.support.stored_rows import get_retained, put_retained

LONG = tuple(1 + index % 250 for index in range(400))  # more than it takes for a turn to be worth keeping


async def long_turns(server: Gateway, num_turns: int = 6) -> tuple[int, ...]:
    """The log of turns of 404 tokens."""
    await create(server)
    for turn in range(num_turns):
        await say(server, *LONG, seed=turn + 1)
    return await log_of(server)


async def retained_in(server: Gateway) -> tuple[RetainedSnapshot, ...]:
    return await server.services.store.list_retained(KEY)


def last_request(server: Gateway) -> GenerationRequest:
    backend = server.services.backend
    assert isinstance(backend, FakeBackend)
    return backend.requests[-1]


def flipped(raw: bytes) -> bytes:
    """Another last byte, whatever it was."""
    return raw[:-1] + bytes([raw[-1] ^ 1])


async def damage(server: Gateway, *versions: int) -> None:
    retained = await get_retained(server.store)
    for version in versions:
        await put_retained(server.store, version, flipped(retained[version]))


async def test_short_turns_keep_nothing_and_long_ones_a_few() -> None:
    async with gateway(FakeBackend()) as server:
        await create(server)
        for _ in range(5):
            await say(server, 5, 6)
        assert await retained_in(server) == ()
        for _ in range(6):
            await say(server, *LONG)
        retained = await retained_in(server)
        head = await server.services.store.get(KEY)
        assert len(retained) == 2
        assert 0 < retained[0].position < retained[1].position < head.position
        usage = await server.services.store.usage(tenant="default")
        assert usage.num_bytes > head.snapshot_bytes + 4 * head.num_log_tokens + sum(one.num_bytes for one in retained)


@pytest.mark.parametrize("num_retained", [0, 1, 8])
async def test_as_many_are_kept_as_the_setting_says(num_retained: int) -> None:
    async with gateway(FakeBackend(), retained_snapshots=num_retained) as server:
        await long_turns(server, 7)
        assert len(await retained_in(server)) == min(num_retained, 6)


async def test_a_rewind_reads_only_what_lies_behind_the_nearest() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as server:
        log = await long_turns(server)
        retained = await retained_in(server)
        assert [one.version for one in retained] == [1, 2, 3, 4, 5]
        position = retained[2].position + 100
        session = ok(await rewind(server, to_position=position))
        assert session["position"] == position - 1
        request = last_request(server)
        assert request.resume is not None
        assert (request.resume.position, len(request.prompt_ids)) == (retained[2].position, 99)
        snapshot = await snapshot_of(server)
        assert snapshot.state == state_after(log[: position - 1])
        assert snapshot.header.pending_id == log[position - 1]
        assert await retained_in(server) == retained[:3]


async def test_a_rewind_to_a_kept_place_reads_nothing() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as server:
        log = await long_turns(server)
        position, backend = (await retained_in(server))[1].position, server.services.backend
        assert isinstance(backend, FakeBackend)
        num_requests = len(backend.requests)
        ok(await rewind(server, to_position=position + 1))
        assert len(backend.requests) == num_requests
        assert (await snapshot_of(server)).state == state_after(log[:position])
        await say(server, 9)
        assert (await snapshot_of(server)).state == state_after((await log_of(server))[:-1])


async def test_what_an_earlier_numerics_class_computed_is_told_after_a_rewind_and_a_fork() -> None:
    """The kept snapshot is of the running class, and goes on from a state of another."""
    backend = FakeBackend()
    async with gateway(backend, retained_snapshots=8) as server:
        await long_turns(server, 2)
        backend.model = dataclasses.replace(backend.model, numerics="other")
        for _ in range(3):
            await say(server, *LONG)
        position = (await retained_in(server))[3].position
        ok(await server.client.post(f"/v1/sessions/{KEY.session_id}/fork", json={"id": "branch", "version": 4}))
        ok(await rewind(server, to_position=position + 100))
        assert last_request(server).resume is not None
        for name in (KEY.session_id, "branch"):
            stored = await server.services.store.load(KEY._replace(session_id=name))
            header = Snapshot.decode(stored.snapshot or b"").header
            assert (header.numerics, header.earlier_numerics) == ("other", ("fake",))
        ok(await rewind(server, to_position=1))
        assert (await snapshot_of(server)).header.earlier_numerics == ()  # the log alone made it


async def test_R3_damaged_ones_are_passed_over_for_older_ones_and_the_start() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as server:
        log = await long_turns(server)
        retained = await retained_in(server)
        await damage(server, 4, 5)
        position = retained[4].position + 10
        ok(await rewind(server, to_position=position))
        resume = last_request(server).resume
        assert resume is not None
        assert resume.position == retained[2].position
        assert (await snapshot_of(server)).state == state_after(log[: position - 1])
        await damage(server, 1, 2, 3)
        ok(await rewind(server, to_position=position - 5))
        assert last_request(server).resume is None
        assert (await snapshot_of(server)).state == state_after(log[: position - 6])


@pytest.mark.parametrize(
    "changes",
    [
        {"session_id": "s2"},
        {"tenant": "b"},
        {"version": 9},
        {"position": 7},
        {"model_fingerprint": "m"},
        {"numerics": "x"},
    ],
    ids=str,
)
async def test_R2_what_is_not_the_sessions_own_is_passed_over(changes: dict[str, Any]) -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as server:
        log = await long_turns(server, 3)
        for version, raw in (await get_retained(server.store)).items():
            snapshot = Snapshot.decode(raw)
            other = Snapshot(dataclasses.replace(snapshot.header, **changes), snapshot.state).encode()
            await put_retained(server.store, version, other)
        ok(await rewind(server, to_position=900))
        assert last_request(server).resume is None
        assert (await snapshot_of(server)).state == state_after(log[:899])


async def test_another_models_are_dropped_with_its_state(tmp_path: Path) -> None:
    store = SqliteSessionStore(tmp_path / "sessions.db")
    async with gateway(FakeBackend(), store=store) as server:
        await long_turns(server, 3)
        assert await retained_in(server)
    newer = FakeBackend(fingerprint="new")
    async with gateway(newer, store=store) as server:
        leases = Leases(store, lease_s=10.0, metrics=server.services.metrics)
        assert [one.outcome async for one in Migrator(store, newer, leases).run([KEY])] == ["migrated"]
        assert await retained_in(server) == ()
        await say(server, *LONG)
        assert [one.version for one in await retained_in(server)] == [4]  # the state that the migration made


async def test_a_response_that_is_continued_twice_forks_from_the_nearest() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as server:
        last: dict[str, Any] = {}
        ids = []
        for _ in range(4):
            text = "It was the best of times, it was the worst of times. " * 40
            body = {"input": text, **({"previous_response_id": last["id"]} if last else {})}
            last = ok(await server.client.post("/v1/responses", json=body))
            ids.append(last["id"])
        ok(await server.client.post("/v1/responses", json={"input": "And?", "previous_response_id": ids[2]}))
        backend = server.services.backend
        assert isinstance(backend, FakeBackend)
        assert len(backend.requests) == 5  # the fork begins at a kept place: nothing is read for it
        resume = backend.requests[-1].resume
        assert resume is not None
        assert resume.position > 1_500
        heads = (await server.services.store.list(tenant="default", limit=10)).heads
        for head in heads:
            key = SessionKey("default", head.session_id)
            log = await server.services.store.read_log(key)
            stored = await server.services.store.load(key)
            assert stored.snapshot is not None
            assert Snapshot.decode(stored.snapshot).state == state_after(log[: head.position])
        assert len(heads) == 2


async def test_an_engine_goes_on_from_a_kept_state_as_from_the_whole_log(make_backend: MakeBackend) -> None:
    texts = []
    for num_retained in (0, 4):
        async with gateway(make_backend(), retained_snapshots=num_retained, snapshot_tokens=0) as server:
            await long_turns(server, 3)
            assert len(await retained_in(server)) == min(num_retained, 2)
            ok(await rewind(server, to_position=700))
            answer = await say(server, 5, 6, max_tokens=12, temperature=1.0)
            texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
