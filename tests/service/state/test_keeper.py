"""Turns that commit their tokens alone: where their states are meanwhile, and when they are stored."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.errors import StoreUnavailable
from nsm_core.state.snapshot import Snapshot
from service.state import keeper
from service.state.at_head import copy_with_head_state
from service.state.copies import create_copy, read_copy
from service.state.keeper import SnapshotPolicy
from service.stores.sessions.base import LateSnapshot, SessionHead
from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend, state_after
from tests.support.turns import KEY, TurnHarness, make_harness

LIMIT = 20
MANY_BYTES = 10**6
POLICY = SnapshotPolicy(max_bytes=MANY_BYTES, limit=LIMIT, idle_s=3600.0)


def exact() -> FakeBackend:
    return FakeBackend("abcdefghijklmnopqrstuvwxyz" * 40, replays_exactly=True)


async def newest(harness: TurnHarness) -> SessionHead:
    return await harness.store.get(KEY)


async def head_state(harness: TurnHarness, turns: Any = None) -> bytes:
    """The state of the head, as an export would have it."""
    keeper = (turns or harness.turns).keeper
    copy = await copy_with_head_state(harness.backend, keeper, await read_copy(harness.store, KEY), deadline=1e9)
    assert copy.snapshot is not None
    snapshot = Snapshot.decode(copy.snapshot)
    assert (snapshot.header.version, snapshot.header.position) == (copy.head.version, copy.head.position)
    return snapshot.state


async def expected_state(harness: TurnHarness) -> bytes:
    head = await newest(harness)
    return state_after((await harness.store.read_log(KEY))[: head.position])


async def test_a_turn_commits_its_tokens_and_the_next_takes_the_state_from_memory() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        assert (await newest(harness)).snapshot_version == 0
        await harness.say(4)
        first, second = harness.backend.requests
        assert second.resume is not None
        assert (second.resume.position, second.prompt_ids[1:]) == (7, (4,))
        assert first.resume is None
        assert harness.sample("nsm_state_source_total", source="memory") == 1.0
        assert harness.sample("nsm_replayed_tokens_total") == 0.0
        assert harness.metrics.registry.get_sample_value("nsm_state_cache_bytes") > 0.0


@pytest.mark.parametrize("replays_exactly", [True, False], ids=["limit 0", "not exact"])
async def test_each_turn_stores_its_state_where_it_must(replays_exactly: bool) -> None:
    limit = 0 if replays_exactly else LIMIT
    policy = dataclasses.replace(POLICY, limit=limit)
    async with make_harness(FakeBackend(replays_exactly=replays_exactly), policy=policy) as harness:
        for version in (1, 2):
            await harness.say(1, 2, 3)
            assert (await newest(harness)).snapshot_version == version
        assert harness.sample("nsm_snapshots_total", outcome="committed") == 2.0
        assert harness.sample("nsm_state_source_total", source="memory") == 1.0


async def test_another_process_reads_the_log_from_the_snapshot_and_says_so() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        other = harness.make_turns(harness.backend)
        harness.turns, mine = other, harness.turns
        end = await harness.say(9)
        assert (end.finished.cached_tokens, end.finished.replayed_tokens) == (0, 7)
        assert end.finished.prompt_tokens == 7 + 1 + 1
        assert harness.sample("nsm_replayed_tokens_total") == 7.0
        assert harness.sample("nsm_state_source_total", source="log") == 1.0
        assert end.head.energy_joules == 0.0
        harness.turns = mine
        await harness.say(5)  # its own state is of an older version by now
        assert harness.sample("nsm_state_source_total", source="log") == 2.0
        assert await head_state(harness) == await expected_state(harness)


async def test_a_session_whose_turns_come_from_several_processes_gets_a_snapshot_past_the_limit() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        both = [harness.turns, harness.make_turns(harness.backend)]
        for turn in range(8):
            harness.turns = both[turn % 2]
            await harness.say(turn)
            await written(*both)
            head = await newest(harness)
            assert head.position - head.snapshot_position <= LIMIT + 6
        assert (harness.sample("nsm_snapshots_total", outcome="stored") or 0.0) >= 1.0


async def written(*all_turns: Any) -> None:
    """Until no snapshot waits."""
    for turns in all_turns:
        while (task := turns.keeper._writer._task) is not None:
            await asyncio.wait((task,))


@pytest.mark.parametrize(
    ("busy_bytes", "expected"),
    [(90, 8), (1, 84), (0.01, 875)],
    ids=["no sooner than after 8 limits", "by the bytes of the state", "no later than after 875"],
)
async def test_a_busy_session_gets_a_snapshot_after_many_tokens(
    busy_bytes: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States have 40 bytes, and SQLite writes 2.1 for each."""
    monkeypatch.setattr(keeper, "BUSY_BYTES", busy_bytes)
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=1)) as harness:
        while (await newest(harness)).snapshot_version == 0:
            await harness.say(1)
            await written(harness.turns)
        head = await newest(harness)
        assert expected < head.snapshot_position <= expected + 6
        assert head.snapshot_version == head.version


async def test_a_turn_that_took_many_tokens_leaves_a_snapshot_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "BUSY_BYTES", 0.01)
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=1)) as harness:
        await harness.say(1)
        await harness.say(1)
        await written(harness.turns)
        assert (await newest(harness)).snapshot_version == 0  # 9 tokens, but in two turns
        await harness.say(*range(1, 9))
        await written(harness.turns)
        head = await newest(harness)
        assert (head.snapshot_version, head.snapshot_position) == (3, head.position)
        other = harness.make_turns(harness.backend)
        harness.turns = other
        end = await harness.say(9)
        assert end.finished.replayed_tokens == 0


async def test_the_limit_is_what_is_read_in_40_ms_but_not_more_than_a_device_reads_in_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=None)) as harness:
        mine = harness.turns.keeper
        for tokens_per_s, limit in ((100.0, 16), (8_000.0, 320), (1_300_000.0, 4_096)):
            monkeypatch.setattr(mine._reading, "tokens_per_s", tokens_per_s)
            assert mine.limit == limit


async def test_an_idle_session_gets_a_snapshot_if_its_log_is_past_the_limit() -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=5)) as harness:
        await harness.say(1, 2, 3)
        harness.turns.keeper._sweep()
        await written(harness.turns)
        assert (await newest(harness)).snapshot_version == 0
        harness.now_s = 3600.0
        harness.turns.keeper._sweep()
        await written(harness.turns)
        head = await newest(harness)
        assert (head.snapshot_version, head.snapshot_position) == (1, head.position)
        harness.turns.keeper._sweep()  # it is stored: nothing more to do
        await written(harness.turns)
        assert harness.sample("nsm_snapshots_total", outcome="stored") == 1.0


async def test_a_state_that_leaves_memory_is_stored_if_its_log_is_past_the_limit() -> None:
    policy = SnapshotPolicy(max_bytes=5_000, limit=5, idle_s=3600.0)  # one of 40 bytes and its entry
    async with make_harness(exact(), policy=policy) as harness:
        await harness.create("s2")
        await harness.say(1, 2, 3)
        await harness.say(1, 2, 3, key=SessionKey("default", "s2"), request_id="r2")
        await written(harness.turns)
        assert (await newest(harness)).snapshot_version == 1
        assert (await harness.store.get(SessionKey("default", "s2"))).snapshot_version == 0


async def test_a_server_that_stops_stores_what_is_past_the_limit() -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=5)) as harness:
        await harness.say(1, 2, 3)
        await harness.turns.drain(grace_s=5.0)
        assert (await newest(harness)).snapshot_version == 1


async def test_a_snapshot_that_cannot_be_stored_costs_nothing_but_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=5)) as harness:
        await harness.say(1, 2, 3)

        async def fail(key: SessionKey, late: LateSnapshot) -> None:
            raise StoreUnavailable("the store is away")

        monkeypatch.setattr(harness.store, "put_snapshot", fail)
        harness.now_s = 3600.0
        harness.turns.keeper._sweep()
        await written(harness.turns)
        assert harness.sample("nsm_snapshots_total", outcome="failed") == 1.0
        harness.turns = harness.make_turns(harness.backend)
        await harness.say(4)
        assert await head_state(harness) == await expected_state(harness)


async def test_a_fork_of_a_session_has_its_state_in_memory() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        copy = await read_copy(harness.store, KEY)
        fork = SessionKey("default", "fork")
        head = await create_copy(harness.store, copy, fork, metadata={}, ttl_s=None, forked_from=None)
        harness.turns.keeper.copied(copy.head, head)
        end = await harness.say(4, key=fork, request_id="r2")
        assert (end.finished.replayed_tokens, end.head.version) == (0, 2)
        assert end.finished.cached_tokens == copy.head.position


async def test_a_fork_that_ends_inside_the_newest_turn_has_no_state_in_memory() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        head = await newest(harness)
        cut = dataclasses.replace(head, position=4, num_log_tokens=5)
        target = dataclasses.replace(cut, session_id="fork")
        harness.turns.keeper.copied(cut, target)
        assert await harness.turns.keeper.find(target.key) is None


async def test_a_deleted_session_leaves_nothing_in_memory() -> None:
    async with make_harness(exact(), policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        await harness.turns.delete(KEY)
        assert await harness.turns.keeper.find(KEY) is None
        assert harness.sample("nsm_state_cache_bytes") == 0.0


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 2)),
        min_size=1,
        max_size=8,
    ),
    limit=st.sampled_from([0, 1, 7, 10**6]),
)
def test_R8_states_and_counts_are_those_of_an_unbroken_run(steps: list[tuple[list[int], int, int]], limit: int) -> None:
    """Whichever of three processes runs a turn, and whatever was stored until then."""

    async def run() -> None:
        policy = dataclasses.replace(POLICY, limit=limit)
        async with make_harness(exact(), policy=policy) as harness:
            processes = [harness.turns, *(harness.make_turns(harness.backend) for _ in range(2))]
            for ids, max_tokens, process in steps:
                harness.turns = processes[process]
                await harness.say(*ids, max_tokens=max_tokens)
                request = harness.backend.requests[-1]
                counts = request.resume.generated_counts if request.resume else request.generated_counts
                sampled = sum(one[1] for one in steps[: len(harness.backend.requests) - 1])
                assert sum(counts.values()) == sampled
            await written(*processes)
            for process in processes:
                assert await head_state(harness, process) == await expected_state(harness)
            for process in processes:
                await process.drain(grace_s=5.0)

    asyncio.run(run())


class HeldWrites:
    """The store's late snapshots wait until they may go."""

    def __init__(self, harness: TurnHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go = asyncio.Event()
        self._put = harness.store.put_snapshot
        monkeypatch.setattr(harness.store, "put_snapshot", self.put)

    async def put(self, key: SessionKey, late: LateSnapshot) -> SessionHead | None:
        await self.may_go.wait()
        return await self._put(key, late)


async def test_a_busy_session_has_one_snapshot_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=1)) as harness:
        writes = HeldWrites(harness, monkeypatch)
        while (await newest(harness)).position <= 20:
            await harness.say(1)
        writes.may_go.set()
        await written(harness.turns)
        head = await newest(harness)
        assert harness.sample("nsm_snapshots_total", outcome="stored") == 1.0
        assert 8 < head.snapshot_position < head.position


async def test_a_writer_that_falls_behind_drops_the_oldest_snapshots_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with make_harness(exact(), policy=dataclasses.replace(POLICY, limit=1, idle_s=1.0)) as harness:
        writes = HeldWrites(harness, monkeypatch)
        keys = [SessionKey("default", f"busy-{number}") for number in range(6)]
        for number, key in enumerate(keys):
            await harness.create(key.session_id)
            await harness.say(number + 1, 2, 3, key=key)
        keeper, harness.now_s = harness.turns.keeper, 2.0
        monkeypatch.setattr(keeper._writer, "_max_bytes", 100)  # states have 40 bytes
        keeper._sweep()
        await asyncio.sleep(0)  # the newest is with the store, and does not wait any more
        assert harness.sample("nsm_snapshots_total", outcome="dropped") == 4.0
        for key in keys:
            await harness.say(9, key=key)
        writes.may_go.set()
        await written(harness.turns)
        harness.turns = harness.make_turns(harness.backend)  # another process: it has the store alone
        for number, key in enumerate(keys):
            head = await harness.store.get(key)
            assert (head.version, head.num_log_tokens) == (2, 13)
            await harness.say(5, key=key)
            read = harness.backend.requests[-1]
            start = 0 if read.resume is None else read.resume.position
            assert (start, start + len(read.prompt_ids)) == (head.snapshot_position, 13 + 1)
            log = await harness.store.read_log(key)
            assert log[1:4] == (number + 1, 2, 3)
            assert len(log) == 18
