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
from tests.service.routes.test_session_rewind import KEY, create, log_of, ok, rewind, say, snapshot_of
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, gateway
from tests.support.stored_rows import get_retained, put_retained

LONG = tuple(1 + index % 250 for index in range(400))  # more than it takes for a turn to be worth keeping


async def long_turns(house: Gateway, num_turns: int = 6) -> tuple[int, ...]:
    """The log of turns of 404 tokens."""
    await create(house)
    for turn in range(num_turns):
        await say(house, *LONG, seed=turn + 1)
    return await log_of(house)


async def kept_in(house: Gateway) -> tuple[RetainedSnapshot, ...]:
    return await house.services.store.list_retained(KEY)


def last_request(house: Gateway) -> GenerationRequest:
    backend = house.services.backend
    assert isinstance(backend, FakeBackend)
    return backend.requests[-1]


async def damage(house: Gateway, *versions: int) -> None:
    retained = await get_retained(house.store)
    for version in versions:
        await put_retained(house.store, version, retained[version][:-1] + b"\0")


async def test_short_turns_keep_nothing_and_long_ones_a_few() -> None:
    async with gateway(FakeBackend()) as house:
        await create(house)
        for _ in range(5):
            await say(house, 5, 6)
        assert await kept_in(house) == ()
        for _ in range(6):
            await say(house, *LONG)
        kept = await kept_in(house)
        head = await house.services.store.get(KEY)
        assert len(kept) == 2
        assert 0 < kept[0].position < kept[1].position < head.position
        usage = await house.services.store.usage(tenant="default")
        assert usage.num_bytes > head.snapshot_bytes + 4 * head.num_log_tokens + sum(one.num_bytes for one in kept)


@pytest.mark.parametrize("num_kept", [0, 1, 8])
async def test_as_many_are_kept_as_the_setting_says(num_kept: int) -> None:
    async with gateway(FakeBackend(), retained_snapshots=num_kept) as house:
        await long_turns(house, 7)
        assert len(await kept_in(house)) == min(num_kept, 6)


async def test_a_rewind_reads_only_what_lies_behind_the_nearest() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as house:
        log = await long_turns(house)
        kept = await kept_in(house)
        assert [one.version for one in kept] == [1, 2, 3, 4, 5]
        place = kept[2].position + 100
        session = ok(await rewind(house, to_position=place))
        assert session["position"] == place - 1
        request = last_request(house)
        assert request.resume is not None
        assert (request.resume.position, len(request.prompt_ids)) == (kept[2].position, 99)
        snapshot = await snapshot_of(house)
        assert snapshot.state == state_after(log[: place - 1])
        assert snapshot.header.pending_id == log[place - 1]
        assert await kept_in(house) == kept[:3]


async def test_a_rewind_to_a_kept_place_reads_nothing() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as house:
        log = await long_turns(house)
        place, backend = (await kept_in(house))[1].position, house.services.backend
        assert isinstance(backend, FakeBackend)
        num_requests = len(backend.requests)
        ok(await rewind(house, to_position=place + 1))
        assert len(backend.requests) == num_requests
        assert (await snapshot_of(house)).state == state_after(log[:place])
        await say(house, 9)
        assert (await snapshot_of(house)).state == state_after((await log_of(house))[:-1])


async def test_R3_damaged_ones_are_passed_over_for_older_ones_and_the_start() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as house:
        log = await long_turns(house)
        kept = await kept_in(house)
        await damage(house, 4, 5)
        place = kept[4].position + 10
        ok(await rewind(house, to_position=place))
        resume = last_request(house).resume
        assert resume is not None
        assert resume.position == kept[2].position
        assert (await snapshot_of(house)).state == state_after(log[: place - 1])
        await damage(house, 1, 2, 3)
        ok(await rewind(house, to_position=place - 5))
        assert last_request(house).resume is None
        assert (await snapshot_of(house)).state == state_after(log[: place - 6])


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
    async with gateway(FakeBackend(), retained_snapshots=8) as house:
        log = await long_turns(house, 3)
        for version, raw in (await get_retained(house.store)).items():
            snapshot = Snapshot.decode(raw)
            other = Snapshot(dataclasses.replace(snapshot.header, **changes), snapshot.state).encode()
            await put_retained(house.store, version, other)
        ok(await rewind(house, to_position=900))
        assert last_request(house).resume is None
        assert (await snapshot_of(house)).state == state_after(log[:899])


async def test_another_models_are_dropped_with_its_state(tmp_path: Path) -> None:
    store = SqliteSessionStore(tmp_path / "sessions.db")
    async with gateway(FakeBackend(), store=store) as house:
        await long_turns(house, 3)
        assert await kept_in(house)
    async with gateway(FakeBackend(fingerprint="new"), store=store) as house:
        await say(house, *LONG)
        assert await kept_in(house) == ()
        await say(house, *LONG)
        assert [one.version for one in await kept_in(house)] == [4]


async def test_a_response_that_is_continued_twice_forks_from_the_nearest() -> None:
    async with gateway(FakeBackend(), retained_snapshots=8) as house:
        last: dict[str, Any] = {}
        ids = []
        for _ in range(4):
            text = "It was the best of times, it was the worst of times. " * 40
            body = {"input": text, **({"previous_response_id": last["id"]} if last else {})}
            last = ok(await house.client.post("/v1/responses", json=body))
            ids.append(last["id"])
        ok(await house.client.post("/v1/responses", json={"input": "And?", "previous_response_id": ids[2]}))
        backend = house.services.backend
        assert isinstance(backend, FakeBackend)
        assert len(backend.requests) == 5  # the fork begins at a kept place: nothing is read for it
        resume = backend.requests[-1].resume
        assert resume is not None
        assert resume.position > 1_500
        heads = (await house.services.store.list(tenant="default", limit=10)).heads
        for head in heads:
            key = SessionKey("default", head.session_id)
            log = await house.services.store.read_log(key)
            stored = await house.services.store.load(key)
            assert stored.snapshot is not None
            assert Snapshot.decode(stored.snapshot).state == state_after(log[: head.position])
        assert len(heads) == 2


async def test_an_engine_goes_on_from_a_kept_state_as_from_the_whole_log(make_backend: MakeBackend) -> None:
    texts = []
    for num_kept in (0, 4):
        async with gateway(make_backend(), retained_snapshots=num_kept) as house:
            await long_turns(house, 3)
            assert len(await kept_in(house)) == min(num_kept, 2)
            ok(await rewind(house, to_position=700))
            answer = await say(house, 5, 6, max_tokens=12, temperature=1.0)
            texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
