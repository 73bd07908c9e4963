"""Sessions whose states stay with the engine: all its gateways go on from there, and bytes are fetched late."""

from __future__ import annotations

from nsm_core.state.snapshot import Snapshot
from service.state.copies import create_copy, read_copy
from service.state.keeper import SnapshotPolicy
from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend, state_after
from tests.support.turns import KEY, TurnHarness, make_harness

LIMIT = 20
POLICY = SnapshotPolicy(max_bytes=10**6, limit=LIMIT, idle_s=3600.0)


def holding() -> FakeBackend:
    return FakeBackend("abcdefghijklmnopqrstuvwxyz" * 40, replays_exactly=True, holds_states=True)


async def stored_state(harness: TurnHarness) -> tuple[bytes, bytes]:
    """The newest stored state, and what it must be."""
    snapshot = await harness.snapshot()
    ids = await harness.store.read_log(KEY)
    return snapshot.state, state_after(ids[: snapshot.header.position])


async def test_turns_go_on_from_the_engine_whatever_gateway_has_them() -> None:
    async with make_harness(holding(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        mine, other = harness.turns, harness.make_turns(harness.backend)
        for turns in (other, mine, other):
            harness.turns = turns
            end = await harness.say(9)
            assert end.finished.replayed_tokens == 0
        resumed = [request.resume for request in harness.backend.requests[1:]]
        assert all(resume is not None and resume.held is not None and resume.state == b"" for resume in resumed)
        assert all(request.hold_state for request in harness.backend.requests)
        assert (await harness.store.get(KEY)).snapshot_version == 0
        assert harness.sample("nsm_state_source_total", source="memory") == 3.0
        await other.drain(1.0)


async def test_a_snapshot_that_is_due_is_fetched_behind_the_answer() -> None:
    async with make_harness(holding(), policy=POLICY) as harness:
        while (await harness.store.get(KEY)).position <= LIMIT:
            await harness.say(1, 2, 3, max_tokens=8)
        await harness.turns.keeper.drain()
        assert harness.sample("nsm_snapshots_total", outcome="stored") == 1.0
        state, expected = await stored_state(harness)
        assert state == expected


async def test_an_engine_that_lost_them_reads_the_log_again() -> None:
    async with make_harness(holding(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        harness.backend.states.lose()
        end = await harness.say(4)
        assert end.error is None
        assert end.finished.replayed_tokens == 7
        head = await harness.store.get(KEY)
        held = (await harness.turns.keeper.find(KEY)) or None
        assert held is not None
        snapshot = await harness.turns.keeper.fetch(held)
        assert snapshot is not None
        assert snapshot.state == state_after((await harness.store.read_log(KEY))[: head.position])


async def test_a_state_that_goes_before_it_is_stored_costs_only_the_reading() -> None:
    async with make_harness(holding(), policy=POLICY) as harness:
        while (await harness.store.get(KEY)).position <= LIMIT:
            await harness.say(1, 2, 3, max_tokens=8)
        harness.backend.states.lose()
        await harness.turns.keeper.drain()
        assert harness.sample("nsm_snapshots_total", outcome="dropped") == 1.0
        assert (await harness.store.get(KEY)).snapshot_version == 0


async def test_a_copy_begins_at_the_state_of_its_source() -> None:
    async with make_harness(holding(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        source = await harness.store.get(KEY)
        copy = await read_copy(harness.store, KEY, with_snapshot=False)
        key = SessionKey("default", "fork")
        target = await create_copy(harness.store, copy, key, metadata={}, ttl_s=None, forked_from=None)
        harness.turns.keeper.copied(source, target)
        hot = await harness.turns.keeper.find(target.key)
        assert hot is not None
        assert hot.snapshot.header.session_id == "fork"
        harness.turns.keeper.forget(KEY)
        fetched = await harness.turns.keeper.fetch(hot)
        assert isinstance(fetched, Snapshot)
        assert await harness.turns.keeper.find(KEY) is None
