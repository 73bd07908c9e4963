"""Sessions whose states stay with the engine: all its gateways go on from there, and bytes are fetched late."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, NamedState
from nsm_core.errors import EngineDead, NsmError, Overloaded
from nsm_core.state.snapshot import Snapshot
from service.state.copies import create_copy, read_copy
from service.state.keeper import SnapshotPolicy
from service.stores.sessions.key import SessionKey
from tests.support.fakes import STATE_BYTES, FakeBackend, FakeGeneration, state_after
from tests.support.turns import KEY, TurnHarness, collect, make_harness

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


class Refusing(FakeBackend):
    """As an engine in another process: it refuses a request with `error` after it was sent, once. `submit_error`: at
    once, a request that starts from a held state.
    """

    error_once: NsmError | None = None
    submit_error: NsmError | None = None

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.submit_error is not None and request.resume is not None and request.resume.held is not None:
            raise self.submit_error
        if self.error_once is None:
            return super().submit(request)
        refused, self.error_once = Refused(self, request, self.error_once), None
        return refused


class Refused(FakeGeneration):
    def __init__(self, backend: FakeBackend, request: GenerationRequest, error: NsmError) -> None:
        super().__init__(backend, request)
        self._error = error

    async def events(self) -> AsyncIterator[Event]:
        yield Finished(reason=FinishReason.ERROR, error=self._error)


def refusing() -> Refusing:
    return Refusing("abcdefghijklmnopqrstuvwxyz" * 40, replays_exactly=True, holds_states=True)


async def all_read(harness: TurnHarness) -> bool:
    """Whether the state of the session is that of its log, read once."""
    head, hot = await harness.store.get(KEY), await harness.turns.keeper.find(KEY)
    snapshot = None if hot is None else await harness.turns.keeper.fetch(hot)
    log = await harness.store.read_log(KEY)
    return snapshot is not None and snapshot.state == state_after(log[: head.position])


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_state_that_goes_between_lookup_and_start_costs_only_the_reading(is_at_once: bool) -> None:
    backend = refusing()
    async with make_harness(backend, policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        found = backend.find_state

        async def find_and_lose(name: str) -> NamedState | None:
            state = await found(name)
            backend.states.lose()
            backend.find_state = found  # type: ignore[method-assign]
            if not is_at_once:
                backend.error_once = EngineDead("it does not hold the state")
            return state

        backend.find_state = find_and_lose  # type: ignore[method-assign]
        tokens, end = await collect(await harness.open(4))
        assert (end.error, len(tokens), end.finished.replayed_tokens) == (None, 4, 7)
        assert [token.index for token in tokens] == [1, 2, 3, 4]
        assert await all_read(harness)


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_turn_whose_engine_is_full_takes_its_state_to_another(is_at_once: bool) -> None:
    backend = refusing()
    async with make_harness(backend, policy=POLICY) as harness:
        await harness.say(1, 2, 3)
        full = Overloaded("the queue is full")
        backend.submit_error, backend.error_once = (full, None) if is_at_once else (None, full)
        end = await harness.say(4)
        assert (end.error, end.finished.replayed_tokens) == (None, 0)
        resume = backend.requests[-1].resume
        assert resume is not None
        assert (resume.held, len(resume.state)) == (None, STATE_BYTES)
        assert await all_read(harness)


async def test_without_another_engine_the_first_refusal_stands() -> None:
    backend = refusing()
    async with make_harness(backend, policy=POLICY) as harness:
        before = (await harness.say(1, 2, 3)).head
        backend.error_once = EngineDead("it ended")
        turn = await harness.open(4)
        backend.is_full = True
        end = (await collect(turn))[1]
        assert isinstance(end.error, EngineDead)
        backend.is_full = False
        backend.submit_error = Overloaded("the engine with the state is full")
        backend.is_full = True
        with pytest.raises(Overloaded):
            await harness.open(4)
        backend.is_full = False
        assert await harness.store.get(KEY) == before
        assert (await harness.say(4)).error is None
