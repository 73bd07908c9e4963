"""How a turn ends: committed, or stopped, refused or failed with the session where it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nsm_core.engine.request import Event, Finished, FinishReason
from nsm_core.errors import (
    DeadlineExceeded,
    LeaseLost,
    NotFound,
    Overloaded,
    SessionBusy,
    StorageFull,
    StoreUnavailable,
    TurnCancelled,
    VersionConflict,
)
from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend, FakeGeneration
from tests.support.stored_rows import lease_holder, steal_lease
from tests.support.turns import KEY, collect, make_harness


async def test_S8_a_cancelled_turn_leaves_the_session_at_its_last_commit() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        harness.backend.release(4)
        before = (await harness.say(5)).head
        turn = await harness.open(6)
        harness.backend.release(2)
        await harness.backend.held.wait()
        assert await harness.turns.cancel(KEY)
        tokens, end = await collect(turn)
        assert (len(tokens), end.finished.reason, end.head) == (2, FinishReason.ABORT, before)
        assert isinstance(end.error, TurnCancelled)
        assert await harness.store.get(KEY) == before
        assert harness.backend.num_cancels == 1
        harness.backend.release_all()
        await harness.say(6)
        assert harness.backend.requests[1].prompt_ids == harness.backend.requests[2].prompt_ids
        assert harness.backend.requests[1].resume == harness.backend.requests[2].resume


async def test_cancelling_where_nothing_runs_says_so() -> None:
    async with make_harness() as harness:
        assert not await harness.turns.cancel(KEY)
        assert not await harness.turns.cancel(SessionKey("default", "nobody"))


async def test_a_cancel_that_comes_while_the_session_is_loaded_is_not_lost() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        harness.backend.release(4)
        await harness.say(5)
        opening = asyncio.create_task(harness.open(6))
        await asyncio.sleep(0)
        assert harness.turns.num_running == 1
        assert await harness.turns.cancel(KEY)
        assert (await collect(await opening))[1].finished.reason is FinishReason.ABORT


async def test_a_cancel_during_the_commit_is_too_late_and_says_so() -> None:
    async with make_harness() as harness:
        harness.store.may_commit.clear()
        turn = await harness.open(5)
        await harness.store.is_committing.wait()
        cancelling = asyncio.create_task(harness.turns.cancel(KEY))
        await asyncio.sleep(0)
        harness.store.may_commit.set()
        assert not await cancelling
        assert (await collect(turn))[1].head.version == 1


async def test_an_error_of_the_engine_ends_the_turn_without_a_commit() -> None:
    async with make_harness(FakeBackend(fail_after=2, error=DeadlineExceeded("too late"))) as harness:
        tokens, end = await collect(await harness.open(5))
        assert len(tokens) == 2
        assert (end.finished.reason, end.head.version) == (FinishReason.ERROR, 0)
        assert isinstance(end.error, DeadlineExceeded)
        assert harness.sample("nsm_request_success_total", finished_reason="error") == 1
        harness.backend.fail_after = None
        assert (await harness.say(5)).head.version == 1


@pytest.mark.parametrize("error", [StorageFull("full"), StoreUnavailable("away"), VersionConflict("moved on")])
async def test_a_commit_that_fails_is_the_turns_error(error: Exception) -> None:
    async with make_harness() as harness:
        harness.store.commit_error = error
        tokens, end = await collect(await harness.open(5))
        assert len(tokens) == 4
        assert (end.error, end.head.version) == (error, 0)
        harness.store.commit_error = None
        assert (await harness.say(5)).head.version == 1


async def test_a_fault_of_our_own_ends_the_turn_with_an_error_that_tells_no_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make_harness() as harness:
        harness.store.commit_error = ZeroDivisionError("secret detail")
        end = await harness.say(5)
        assert end.finished.reason is FinishReason.ERROR
        assert str(end.error) == "internal error; the server's log has details under request id r1"
        assert "secret detail" in caplog.text


async def test_an_engine_that_breaks_off_without_finished_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_events(self: FakeGeneration) -> AsyncIterator[Event]:
        self.abort()
        for event in list[Event]():
            yield event

    async with make_harness() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(FakeGeneration, "events", no_events)
            assert (await harness.say(5)).finished.reason is FinishReason.ERROR
        assert (await harness.say(5)).head.version == 1


async def test_deleting_a_session_stops_its_turn_first() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        await harness.backend.held.wait()
        await harness.turns.delete(KEY)
        assert (await collect(turn))[1].finished.reason is FinishReason.ABORT
        with pytest.raises(NotFound):
            await harness.store.get(KEY)
        with pytest.raises(NotFound):
            await harness.turns.delete(KEY)


async def test_draining_lets_turns_finish_within_the_grace_time() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        draining = asyncio.create_task(harness.turns.drain(grace_s=30.0))
        await harness.backend.held.wait()
        with pytest.raises(Overloaded, match="stopping"):
            await harness.open(6, key=SessionKey("default", "s2"))
        assert not draining.done()
        harness.backend.release_all()
        await draining
        assert (await collect(turn))[1].head.version == 1


async def test_draining_stops_what_outlasts_the_grace_time_with_a_proper_end() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        harness.backend.release()
        await harness.backend.held.wait()
        await harness.turns.drain(grace_s=0.0)
        tokens, end = await collect(turn)
        assert len(tokens) <= 1
        assert (end.finished.reason, end.head.version) == (FinishReason.ABORT, 0)
        assert isinstance(end.error, Overloaded)
        assert harness.turns.num_running == 0


async def test_a_turns_task_that_is_cancelled_itself_frees_the_session_and_ends_the_stream() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        await harness.backend.held.wait()
        for task in tuple(harness.turns._tasks):
            task.cancel()
        assert (await collect(turn))[1].finished == Finished(reason=FinishReason.ABORT)
        assert harness.backend.num_cancels == 1


async def test_D8_a_turn_whose_lease_was_taken_over_is_stopped_and_keeps_nothing() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        harness.turns = harness.make_turns(harness.backend, lease_s=0.3)
        turn = await harness.open(5)
        await harness.backend.held.wait()
        await steal_lease(harness.store, "another turn")
        tokens, end = await collect(turn)
        assert (tokens, end.finished.reason, end.head.version) == ([], FinishReason.ABORT, 0)
        assert isinstance(end.error, LeaseLost)
        assert harness.backend.num_cancels == 1
        assert await lease_holder(harness.store) == "another turn"
        with pytest.raises(SessionBusy):
            await harness.open(6)


async def test_D8_a_turn_that_slept_through_its_lease_cannot_commit() -> None:
    async with make_harness() as harness:
        harness.store.may_commit.clear()
        turn = await harness.open(5)
        await harness.store.is_committing.wait()
        await steal_lease(harness.store, "another turn")
        harness.store.may_commit.set()
        end = (await collect(turn))[1]
        assert isinstance(end.error, LeaseLost)
        assert (await harness.store.get(KEY)).version == 0


async def test_every_end_of_a_turn_frees_the_session_for_other_processes() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        with pytest.raises(VersionConflict):
            await harness.open(5, expected_version=3)
        assert await lease_holder(harness.store) is None
        await harness.open(5)
        await harness.turns.cancel(KEY)
        assert await lease_holder(harness.store) is None
        harness.backend.refusal = Overloaded("full")
        with pytest.raises(Overloaded):
            await harness.open(5)
        assert await lease_holder(harness.store) is None
