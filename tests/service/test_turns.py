from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import Event, Finished, FinishReason, TokenEvent
from nsm_core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    NotFound,
    Overloaded,
    SessionBusy,
    SnapshotCorrupt,
    StateMismatch,
    StorageFull,
    StoreUnavailable,
    TurnCancelled,
    VersionConflict,
)
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.continuation import TurnRequest
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.sessions.base import Lease, SessionHead
from service.sessions.memory import MemorySessionStore
from service.tenants import Tenants
from service.turn import Turn, TurnEnd
from service.turns import Turns
from tests.fakes import FakeBackend, FakeGeneration, state_after

KEY = {"tenant": "default", "session_id": "s1"}
EOT = 0


class FaultyStore(MemorySessionStore):
    """A memory store whose commits can be held or made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.commit_error: Exception | None = None
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.is_committing = asyncio.Event()

    async def commit(self, lease: Lease, **fields: Any) -> SessionHead:
        self.is_committing.set()
        await self.may_commit.wait()
        if self.commit_error is not None:
            raise self.commit_error
        return await super().commit(lease, **fields)


class House:
    """A store with one empty session, a fake backend and the turns over both."""

    def __init__(self, backend: FakeBackend, *, detached_s: float = 60.0) -> None:
        self.backend = backend
        self.store = FaultyStore()
        self.metrics = Metrics(backend)
        self.lifecycle = Lifecycle()
        self.turns = self.make_turns(backend, detached_s=detached_s)

    def make_turns(self, backend: FakeBackend, *, detached_s: float = 60.0, lease_s: float = 30.0) -> Turns:
        return Turns(
            backend,
            self.store,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            detached_s=detached_s,
            lease_s=lease_s,
            tenants=Tenants(None, self.store, self.metrics),
            clock=lambda: 5.0,
        )

    async def create(self, session_id: str = "s1") -> SessionHead:
        return await self.store.create(
            tenant="default", session_id=session_id, model_fingerprint="fake-fingerprint", metadata={}
        )

    async def open(self, *input_ids: int, **changes: Any) -> Turn:
        return await self.turns.open_turn(make_request(*input_ids, **changes))

    async def say(self, *input_ids: int, **changes: Any) -> TurnEnd:
        return (await collect(await self.open(*input_ids, **changes)))[1]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def snapshot(self, session_id: str = "s1") -> Snapshot:
        stored = await self.store.load(tenant="default", session_id=session_id)
        assert stored.snapshot is not None
        return Snapshot.decode(stored.snapshot)


def make_request(*input_ids: int, max_tokens: int = 4, seed: int | None = None, **changes: Any) -> TurnRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=77 if seed is None else seed)
    fields: dict[str, Any] = {
        "request_id": "r1",
        "tenant": "default",
        "session_id": "s1",
        "input_ids": input_ids,
        "is_verbatim": False,
        "sampling": sampling,
        "has_own_seed": seed is not None,
        "arrival": time.monotonic(),
    }
    return TurnRequest(**{**fields, **changes})


async def collect(turn: Turn) -> tuple[list[TokenEvent], TurnEnd]:
    events = [event async for event in turn.events()]
    end = events.pop()
    assert isinstance(end, TurnEnd)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == len(events)
    return tokens, end


@contextlib.asynccontextmanager
async def make_house(backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[House]:
    """Nothing may still run, and no task may be left, when a test ends."""
    house = House(backend or FakeBackend(), **settings)
    await house.create()
    tasks_before = asyncio.all_tasks()
    yield house
    house.backend.release_all()
    await house.turns.drain(grace_s=5.0)
    assert house.turns.num_running == 0
    assert not house.backend.running
    assert asyncio.all_tasks() == tasks_before


async def test_a_first_turn_starts_with_end_of_text_and_is_committed() -> None:
    async with make_house() as house:
        tokens, end = await collect(await house.open(5, 6))
        assert [token.token_id for token in tokens] == list(house.backend.script_ids[:4])
        assert house.backend.requests[0].prompt_ids == (EOT, 5, 6)
        assert house.backend.requests[0].resume is None
        assert (end.finished.reason, end.error) == (FinishReason.LENGTH, None)
        assert (end.head.version, end.head.position, end.head.num_log_tokens) == (1, 6, 7)
        assert await house.store.get(**KEY) == end.head
        assert await house.store.read_log(**KEY) == (EOT, 5, 6, *house.backend.script_ids[:4])
        snapshot = await house.snapshot()
        assert snapshot.state == state_after((EOT, 5, 6, *house.backend.script_ids[:3]))
        assert (snapshot.header.pending_id, snapshot.header.position) == (house.backend.script_ids[3], 6)
        assert (snapshot.header.version, snapshot.header.parent, snapshot.header.created_at) == (1, 0, 5.0)


async def test_ids_of_a_first_turn_are_taken_verbatim() -> None:
    async with make_house() as house:
        await house.say(5, 6, is_verbatim=True)
        assert house.backend.requests[0].prompt_ids == (5, 6)
        assert await house.store.read_log(**KEY) == (5, 6, *house.backend.script_ids[:4])


@pytest.mark.parametrize("new_ids", [(), (9,), (9, 8)], ids=["0_new_tokens", "1_new_token", "2_new_tokens"])
async def test_R1_R10_R11_a_turn_reads_the_pending_token_once_and_then_only_what_is_new(
    new_ids: tuple[int, ...],
) -> None:
    async with make_house() as house:
        first = await house.say(5, 6)
        second = await house.say(*new_ids)
        script = house.backend.script_ids[:4]
        request = house.backend.requests[1]
        assert request.prompt_ids == (script[3], *new_ids)
        assert second.finished.cached_tokens == first.head.position == 6
        assert second.finished.prompt_tokens == first.head.position + 1 + len(new_ids)
        log = (EOT, 5, 6, *script, *new_ids, *script)
        assert await house.store.read_log(**KEY) == log
        assert (await house.snapshot()).state == state_after(log[:-1])
        assert second.head.position == len(log) - 1


async def test_R12_after_end_of_text_nothing_is_pending_and_the_state_covers_the_visible_text() -> None:
    async with make_house(FakeBackend("It was")) as house:
        first = await house.say(5, max_tokens=50)
        assert first.finished.reason is FinishReason.STOP
        log = await house.store.read_log(**KEY)
        assert log == (EOT, 5, *house.backend.script_ids[:-1])
        snapshot = await house.snapshot()
        assert (snapshot.header.pending_id, snapshot.header.position) == (None, len(log))
        with pytest.raises(InvalidRequest, match="input must not be empty") as caught:
            await house.open()
        assert caught.value.param == "input"
        await house.say(9)
        assert house.backend.requests[1].prompt_ids == (9,)


async def test_a_first_turn_needs_input() -> None:
    async with make_house() as house:
        with pytest.raises(InvalidRequest, match="input must not be empty"):
            await house.open()
        assert house.turns.num_running == 0
        await house.say(5)


async def test_M5_the_first_seed_is_the_sessions_until_a_turn_brings_its_own() -> None:
    async with make_house() as house:
        await house.say(5)  # seed 77 was drawn, not given
        await house.open(6, sampling=SamplingParams(max_tokens=2, seed=1234))
        await house.turns.drain(grace_s=5.0)
        house.turns = house.make_turns(house.backend)
        await house.say(7, seed=5)
        await house.say(8, sampling=SamplingParams(max_tokens=2, seed=4321))
        assert [request.sampling.seed for request in house.backend.requests] == [77, 77, 5, 5]
        assert (await house.snapshot()).header.sampler.seed == 5


async def test_penalty_counts_go_on_from_the_snapshot() -> None:
    async with make_house() as house:
        await house.say(5, max_tokens=2)
        await house.say(6, max_tokens=1)
        first, second = house.backend.script_ids[:2]
        assert house.backend.requests[1].resume is not None
        assert dict(house.backend.requests[1].resume.generated_counts) == {first: 1, second: 1}
        assert dict((await house.snapshot()).header.sampler.generated_counts) == {first: 2, second: 1}


async def test_P5_P6_a_second_turn_at_once_is_refused_and_loses_nothing() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        with pytest.raises(SessionBusy, match="'s1' is busy") as caught:
            await house.open(6)
        assert caught.value.retry_after_s > 0
        await house.create("s2")
        other = await house.open(7, session_id="s2")
        house.backend.release_all()
        assert (await collect(turn))[1].head.version == 1
        assert (await collect(other))[1].head.version == 1
        assert (await house.say(6)).head.version == 2


async def test_the_session_is_free_before_the_last_event_is_out() -> None:
    async with make_house() as house:
        turn = await house.open(5)
        async for event in turn.events():
            if isinstance(event, TurnEnd):
                assert (await house.store.get(**KEY)).version == 1
                assert (await house.say(6)).head.version == 2


async def test_expected_version_must_be_the_heads() -> None:
    async with make_house() as house:
        await house.say(5, expected_version=0)
        with pytest.raises(VersionConflict, match="is at version 1, expected version 0"):
            await house.open(6, expected_version=0)
        assert (await house.say(6, expected_version=1)).head.version == 2


async def test_an_unknown_session_is_refused_before_the_stream() -> None:
    async with make_house() as house:
        with pytest.raises(NotFound):
            await house.open(5, session_id="nobody")
        with pytest.raises(NotFound):
            await house.open(5, tenant="other")
        assert house.turns.num_running == 0


async def test_a_refusal_of_the_engine_frees_the_session() -> None:
    async with make_house() as house:
        house.backend.refusal = Overloaded("the queue is full")
        with pytest.raises(Overloaded):
            await house.open(5)
        house.backend.refusal = None
        assert (await house.say(5)).head.version == 1


async def test_R2_a_state_at_another_place_than_its_header_says_is_told_with_its_session() -> None:
    async with make_house() as house:
        await house.say(5, 6)
        snapshot = await house.snapshot()
        wrong = Snapshot(snapshot.header, snapshot.state[:32] + bytes(len(snapshot.state) - 32))
        house.store._records["default", "s1"].snapshot = wrong.encode()
        with pytest.raises(SnapshotCorrupt, match="session 's1': the state was not reached"):
            await house.open(9)


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other"},
        {"session_id": "s2"},
        {"version": 2},
        {"position": 5},
        {"position": 7},
        {"model_fingerprint": "another"},
        {"tokenizer_fingerprint": "another"},
        {"pending_id": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_R2_R3_a_state_that_is_not_this_sessions_is_refused_never_used(changes: dict[str, Any]) -> None:
    async with make_house() as house:
        await house.say(5, 6)
        snapshot = await house.snapshot()
        wrong = Snapshot(dataclasses.replace(snapshot.header, **changes), snapshot.state)
        house.store._records["default", "s1"].snapshot = wrong.encode()
        error = StateMismatch if "tokenizer_fingerprint" in changes else SnapshotCorrupt
        with pytest.raises(error, match="session 's1'"):
            await house.open(9)
        assert len(house.backend.requests) == 1
        house.store._records["default", "s1"].snapshot = snapshot.encode()
        assert (await house.say(9)).head.version == 2


def flip_last_bit(raw: bytes | None) -> bytes:
    assert raw is not None
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize("reason", ["missing", "corrupt", "fingerprint_mismatch"])
@pytest.mark.parametrize("new_ids", [(), (9,)], ids=["0_new_tokens", "1_new_token"])
async def test_R3_a_lost_state_is_made_again_from_the_log_never_empty(reason: str, new_ids: tuple[int, ...]) -> None:
    async with make_house() as house, make_house() as unbroken:
        for one in (house, unbroken):
            await one.say(5, 6, max_tokens=2)
            await one.say(7, max_tokens=3)
        backend, record = house.backend, house.store._records["default", "s1"]
        if reason == "missing":
            record.snapshot = None
        elif reason == "corrupt":
            record.snapshot = flip_last_bit(record.snapshot)
        else:
            backend = FakeBackend(fingerprint="a newer model")
        turns = house.make_turns(backend)
        turn = await turns.open_turn(make_request(*new_ids))
        end = (await collect(turn))[1]
        expected = await unbroken.say(*new_ids)
        assert (turn.rebuilt, end.error) == (reason, None)
        assert (end.head.version, end.head.position) == (expected.head.version, expected.head.position)
        log = await house.store.read_log(**KEY)
        assert log == await unbroken.store.read_log(**KEY)
        snapshot, model = await house.snapshot(), backend.model.fingerprint
        assert snapshot.state == state_after(log[:-1])
        assert snapshot.header.sampler == (await unbroken.snapshot()).header.sampler
        assert (snapshot.header.model_fingerprint, end.head.model_fingerprint) == (model, model)
        assert backend.requests[-1].prompt_ids == (*log[: len(log) - 4 - len(new_ids)], *new_ids)
        assert (end.finished.cached_tokens, expected.finished.cached_tokens) == (0, 8)
        assert end.finished.prompt_tokens == expected.finished.prompt_tokens
        assert house.sample("nsm_session_resume_total", outcome=reason) == 1
        again = await turns.open_turn(make_request(8))
        assert (again.rebuilt, (await collect(again))[1].finished.cached_tokens) == (None, len(log) - 1)


async def test_a_rebuilt_session_without_a_pending_token_still_needs_input() -> None:
    async with make_house(FakeBackend("It was")) as house:
        await house.say(5, max_tokens=50)
        log = await house.store.read_log(**KEY)
        house.store._records["default", "s1"].snapshot = None
        with pytest.raises(InvalidRequest, match="input must not be empty"):
            await house.open()
        await house.say(9)
        assert house.backend.requests[-1].prompt_ids == (*log, 9)


async def test_a_rebuilt_turn_draws_with_the_sessions_seed() -> None:
    async with make_house() as house:
        await house.say(5, seed=1234)
        house.store._records["default", "s1"].snapshot = None
        await house.say(6)
        assert house.backend.requests[-1].sampling.seed == 1234
        assert (await house.snapshot()).header.sampler.seed == 1234


async def test_a_rebuild_that_is_cancelled_leaves_everything_as_it_was() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        house.backend.release(4)
        before = (await house.say(5)).head
        house.store._records["default", "s1"].snapshot = None
        turn = await house.open(6)
        await house.backend.held.wait()
        assert await house.turns.cancel(**KEY)
        assert (await collect(turn))[1].head == before
        assert house.store._records["default", "s1"].holder is None


async def test_a_log_of_another_tokenizer_is_refused() -> None:
    async with make_house() as house:
        await house.say(5)
        tokenizer = Tokenizer.train(["something else entirely"] * 4, vocab_size=300)
        backend = FakeBackend(fingerprint="a newer model", tokenizer=tokenizer)
        turns = house.make_turns(backend)
        with pytest.raises(StateMismatch, match="another tokenizer"):
            await turns.open_turn(make_request(9))
        house.store._records["default", "s1"].snapshot = None  # now nobody can tell which tokenizer it was
        with pytest.raises(StateMismatch, match="only that model can make it again"):
            await turns.open_turn(make_request(9))
        assert backend.requests == []
        assert house.sample("nsm_session_resume_total", outcome="refused") == 2
        assert (await house.say(9)).head.version == 2


async def test_a_log_that_is_damaged_as_well_is_an_error() -> None:
    async with make_house() as house:
        await house.say(5)
        record = house.store._records["default", "s1"]
        record.snapshot, log = None, record.log
        record.log = log[:-1]
        with pytest.raises(SnapshotCorrupt, match="log of session 's1'"):
            await house.open(9)
        record.log = log
        assert (await house.say(9)).head.version == 2


async def test_a_state_of_another_numerics_class_is_used_and_said() -> None:
    async with make_house() as house:
        assert (await house.open(5)).other_numerics is None
        await house.turns.drain(grace_s=5.0)
        backend = FakeBackend()
        backend.model = dataclasses.replace(backend.model, numerics="other")
        turn = await house.make_turns(backend).open_turn(make_request(6))
        assert turn.other_numerics == "fake"
        assert (await collect(turn))[1].head.version == 2


async def test_S8_a_cancelled_turn_leaves_the_session_at_its_last_commit() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        house.backend.release(4)
        before = (await house.say(5)).head
        turn = await house.open(6)
        house.backend.release(2)
        await house.backend.held.wait()
        assert await house.turns.cancel(**KEY)
        tokens, end = await collect(turn)
        assert (len(tokens), end.finished.reason, end.head) == (2, FinishReason.ABORT, before)
        assert isinstance(end.error, TurnCancelled)
        assert await house.store.get(**KEY) == before
        assert house.backend.num_cancels == 1
        house.backend.release_all()
        await house.say(6)
        assert house.backend.requests[1].prompt_ids == house.backend.requests[2].prompt_ids
        assert house.backend.requests[1].resume == house.backend.requests[2].resume


async def test_cancelling_where_nothing_runs_says_so() -> None:
    async with make_house() as house:
        assert not await house.turns.cancel(**KEY)
        assert not await house.turns.cancel(tenant="default", session_id="nobody")


async def test_a_cancel_that_comes_while_the_session_is_loaded_is_not_lost() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        house.backend.release(4)
        await house.say(5)
        opening = asyncio.create_task(house.open(6))
        await asyncio.sleep(0)
        assert house.turns.num_running == 1
        assert await house.turns.cancel(**KEY)
        assert (await collect(await opening))[1].finished.reason is FinishReason.ABORT


async def test_a_cancel_during_the_commit_is_too_late_and_says_so() -> None:
    async with make_house() as house:
        house.store.may_commit.clear()
        turn = await house.open(5)
        await house.store.is_committing.wait()
        cancelling = asyncio.create_task(house.turns.cancel(**KEY))
        await asyncio.sleep(0)
        house.store.may_commit.set()
        assert not await cancelling
        assert (await collect(turn))[1].head.version == 1


async def test_an_error_of_the_engine_ends_the_turn_without_a_commit() -> None:
    async with make_house(FakeBackend(fail_after=2, error=DeadlineExceeded("too late"))) as house:
        tokens, end = await collect(await house.open(5))
        assert len(tokens) == 2
        assert (end.finished.reason, end.head.version) == (FinishReason.ERROR, 0)
        assert isinstance(end.error, DeadlineExceeded)
        assert house.sample("nsm_request_success_total", finished_reason="error") == 1
        house.backend.fail_after = None
        assert (await house.say(5)).head.version == 1


@pytest.mark.parametrize("error", [StorageFull("full"), StoreUnavailable("away"), VersionConflict("moved on")])
async def test_a_commit_that_fails_is_the_turns_error(error: Exception) -> None:
    async with make_house() as house:
        house.store.commit_error = error
        tokens, end = await collect(await house.open(5))
        assert len(tokens) == 4
        assert (end.error, end.head.version) == (error, 0)
        house.store.commit_error = None
        assert (await house.say(5)).head.version == 1


async def test_a_fault_of_our_own_ends_the_turn_with_an_error_that_tells_no_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make_house() as house:
        house.store.commit_error = ZeroDivisionError("secret detail")
        end = await house.say(5)
        assert end.finished.reason is FinishReason.ERROR
        assert str(end.error) == "internal error; the server's log tells more under request id r1"
        assert "secret detail" in caplog.text


async def test_an_engine_that_breaks_off_without_finished_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_events(self: FakeGeneration) -> AsyncIterator[Event]:
        self.abort()
        for event in list[Event]():
            yield event

    async with make_house() as house:
        with monkeypatch.context() as patch:
            patch.setattr(FakeGeneration, "events", no_events)
            assert (await house.say(5)).finished.reason is FinishReason.ERROR
        assert (await house.say(5)).head.version == 1


async def test_S6_a_client_that_leaves_does_not_stop_its_turn() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        house.backend.release()
        events = turn.events()
        await anext(events)
        await events.aclose()
        assert house.turns.num_running == 1
        house.backend.release_all()
        await turn.ended.wait()
        assert (await house.store.get(**KEY)).version == 1
        assert house.backend.num_cancels == 0


async def test_a_turn_that_goes_on_without_its_client_keeps_the_server_from_stopping() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        await house.backend.held.wait()
        turn.detach()
        assert house.sample("nsm_turns_detached") == 1
        assert not await house.lifecycle.wait_idle(0.0)
        house.backend.release_all()
        assert await house.lifecycle.wait_idle(5.0)
        assert house.sample("nsm_turns_detached") == 0


async def test_what_was_resumed_and_committed_is_counted() -> None:
    async with make_house() as house:
        await house.say(5)
        await house.say(6)
        with pytest.raises(NotFound):
            await house.open(6, session_id="nobody")
        house.store.commit_error = VersionConflict("moved on")
        await house.say(7)
        resumed = [house.sample("nsm_session_resume_total", outcome=outcome) for outcome in ("hit", "miss")]
        assert resumed == [2, 1]
        assert house.sample("nsm_state_commit_seconds_count") == house.sample("nsm_state_bytes_count") == 2
        assert house.sample("nsm_state_fetch_seconds_count") == 3
        assert house.sample("nsm_commit_conflict_total") == 1
        assert house.sample("nsm_request_success_total", finished_reason="length") == 2


async def test_a_turn_without_its_client_is_stopped_after_detached_s() -> None:
    async with make_house(FakeBackend(hold=True), detached_s=0.01) as house:
        turn = await house.open(5)
        await house.backend.held.wait()
        assert not turn.ended.is_set()  # with its client it may take any time
        turn.detach()
        turn.detach()
        await turn.ended.wait()
        assert turn.end is not None
        assert turn.end.finished.reason is FinishReason.ABORT
        assert isinstance(turn.end.error, TurnCancelled)
        assert house.backend.num_cancels == 1
        assert (await house.store.get(**KEY)).version == 0


async def test_detaching_after_the_end_does_nothing() -> None:
    async with make_house(detached_s=0.0) as house:
        turn = await house.open(5)
        await turn.ended.wait()
        turn.detach()
        await asyncio.sleep(0.001)
        assert house.backend.num_cancels == 0
        assert (await collect(turn))[1].head.version == 1


async def test_a_client_that_leaves_before_its_turn_is_open_leaves_the_session_free() -> None:
    async with make_house() as house:
        opening = asyncio.create_task(house.open(5))
        await asyncio.sleep(0)
        assert house.turns.num_running == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert house.turns.num_running == 0
        assert (await house.say(5)).head.version == 1


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 299), min_size=1, max_size=4),  # new input
            st.integers(1, 20),  # max_tokens: the script has 14 and then ends
            st.none() | st.integers(0, 3),  # cancelled after so many tokens, or not
        ),
        max_size=6,
    )
)
async def test_R14_after_any_turns_and_cancels_the_state_is_that_of_one_unbroken_run(
    turns: list[tuple[list[int], int, int | None]],
) -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        num_committed = 0
        for input_ids, max_tokens, cancel_after in turns:
            turn = await house.open(*input_ids, max_tokens=max_tokens)
            events = turn.events()
            if cancel_after is None:
                house.backend.release(max_tokens)
            else:
                house.backend.release(min(cancel_after, max_tokens))
                seen = [await anext(events) for _ in range(min(cancel_after, max_tokens))]
                assert not any(isinstance(event, TurnEnd) for event in seen)
                await house.turns.cancel(**KEY)
            end = [event async for event in events][-1]
            assert isinstance(end, TurnEnd)
            num_committed += end.finished.reason is not FinishReason.ABORT
            house.backend.forget_permits()
        head = await house.store.get(**KEY)
        assert head.version == num_committed
        if num_committed:
            log = await house.store.read_log(**KEY)
            snapshot = await house.snapshot()
            fed = log if snapshot.header.pending_id is None else log[:-1]
            assert snapshot.state == state_after(fed)
            assert log[len(fed) :] in ((), (snapshot.header.pending_id,))


async def test_deleting_a_session_stops_its_turn_first() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        await house.backend.held.wait()
        await house.turns.delete(**KEY)
        assert (await collect(turn))[1].finished.reason is FinishReason.ABORT
        with pytest.raises(NotFound):
            await house.store.get(**KEY)
        with pytest.raises(NotFound):
            await house.turns.delete(**KEY)


async def test_draining_lets_turns_finish_within_the_grace_time() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        draining = asyncio.create_task(house.turns.drain(grace_s=30.0))
        await house.backend.held.wait()
        with pytest.raises(Overloaded, match="stopping"):
            await house.open(6, session_id="s2")
        assert not draining.done()
        house.backend.release_all()
        await draining
        assert (await collect(turn))[1].head.version == 1


async def test_draining_stops_what_outlasts_the_grace_time_with_a_proper_end() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        house.backend.release()
        await house.backend.held.wait()
        await house.turns.drain(grace_s=0.0)
        tokens, end = await collect(turn)
        assert len(tokens) <= 1
        assert (end.finished.reason, end.head.version) == (FinishReason.ABORT, 0)
        assert isinstance(end.error, Overloaded)
        assert house.turns.num_running == 0


async def test_a_turns_task_that_is_cancelled_itself_frees_the_session_and_ends_the_stream() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        await house.backend.held.wait()
        for task in tuple(house.turns._tasks):
            task.cancel()
        assert (await collect(turn))[1].finished == Finished(reason=FinishReason.ABORT)
        assert house.backend.num_cancels == 1


async def test_P5_a_turn_of_another_process_makes_the_session_busy() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        turn = await house.open(5)
        other = house.make_turns(house.backend)  # its own claims, the same store
        with pytest.raises(SessionBusy, match="'s1' is busy") as caught:
            await other.open_turn(make_request(6))
        assert 0 < caught.value.retry_after_s <= 1.0
        house.backend.release_all()
        assert (await collect(turn))[1].head.version == 1
        assert (await collect(await other.open_turn(make_request(6))))[1].head.version == 2


async def test_D8_a_turn_whose_lease_was_taken_over_is_stopped_and_keeps_nothing() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        house.turns = house.make_turns(house.backend, lease_s=0.03)
        turn = await house.open(5)
        await house.backend.held.wait()
        record = house.store._records["default", "s1"]
        record.holder, record.fence = "another turn", record.fence + 1
        tokens, end = await collect(turn)
        assert (tokens, end.finished.reason, end.head.version) == ([], FinishReason.ABORT, 0)
        assert isinstance(end.error, LeaseLost)
        assert house.backend.num_cancels == 1
        assert record.holder == "another turn"
        with pytest.raises(SessionBusy):
            await house.open(6)


async def test_D8_a_turn_that_slept_through_its_lease_cannot_commit() -> None:
    async with make_house() as house:
        house.store.may_commit.clear()
        turn = await house.open(5)
        await house.store.is_committing.wait()
        record = house.store._records["default", "s1"]
        record.holder, record.fence = "another turn", record.fence + 1
        house.store.may_commit.set()
        end = (await collect(turn))[1]
        assert isinstance(end.error, LeaseLost)
        assert (await house.store.get(**KEY)).version == 0


async def test_every_end_of_a_turn_frees_the_session_for_other_processes() -> None:
    async with make_house(FakeBackend(hold=True)) as house:
        record = house.store._records["default", "s1"]
        with pytest.raises(VersionConflict):
            await house.open(5, expected_version=3)
        assert record.holder is None
        await house.open(5)
        await house.turns.cancel(**KEY)
        assert record.holder is None
        house.backend.refusal = Overloaded("full")
        with pytest.raises(Overloaded):
            await house.open(5)
        assert record.holder is None
