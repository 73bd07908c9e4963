"""Turns from their claim to their commit, one after the other and at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.request import FinishReason
from nsm_core.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    SessionBusy,
    VersionConflict,
)
from nsm_core.sampling.params import SamplingParams
from service.stores.sessions.key import SessionKey
from service.turns.turn import TurnOutcome
from tests.support.fakes import FakeBackend, state_after
from tests.support.turns import EOT, KEY, collect, make_harness, make_request


async def test_a_first_turn_starts_with_end_of_text_and_is_committed() -> None:
    async with make_harness() as harness:
        tokens, end = await collect(await harness.open(5, 6))
        assert [token.token_id for token in tokens] == list(harness.backend.script_ids[:4])
        assert harness.backend.requests[0].prompt_ids == (EOT, 5, 6)
        assert harness.backend.requests[0].resume is None
        assert (end.finished.reason, end.error) == (FinishReason.LENGTH, None)
        assert (end.head.version, end.head.position, end.head.num_log_tokens) == (1, 6, 7)
        assert await harness.store.get(KEY) == end.head
        assert await harness.store.read_log(KEY) == (EOT, 5, 6, *harness.backend.script_ids[:4])
        snapshot = await harness.snapshot()
        assert snapshot.state == state_after((EOT, 5, 6, *harness.backend.script_ids[:3]))
        assert (snapshot.header.pending_id, snapshot.header.position) == (harness.backend.script_ids[3], 6)
        assert (snapshot.header.version, snapshot.header.parent, snapshot.header.created_at) == (1, 0, 5.0)


async def test_ids_of_a_first_turn_are_taken_verbatim() -> None:
    async with make_harness() as harness:
        await harness.say(5, 6, is_verbatim=True)
        assert harness.backend.requests[0].prompt_ids == (5, 6)
        assert await harness.store.read_log(KEY) == (5, 6, *harness.backend.script_ids[:4])


@pytest.mark.parametrize("new_ids", [(), (9,), (9, 8)], ids=["0_new_tokens", "1_new_token", "2_new_tokens"])
async def test_R1_R10_R11_a_turn_reads_the_pending_token_once_and_then_only_what_is_new(
    new_ids: tuple[int, ...],
) -> None:
    async with make_harness() as harness:
        first = await harness.say(5, 6)
        second = await harness.say(*new_ids)
        script = harness.backend.script_ids[:4]
        request = harness.backend.requests[1]
        assert request.prompt_ids == (script[3], *new_ids)
        assert second.finished.cached_tokens == first.head.position == 6
        assert second.finished.prompt_tokens == first.head.position + 1 + len(new_ids)
        log = (EOT, 5, 6, *script, *new_ids, *script)
        assert await harness.store.read_log(KEY) == log
        assert (await harness.snapshot()).state == state_after(log[:-1])
        assert second.head.position == len(log) - 1


async def test_R12_after_end_of_text_nothing_is_pending_and_the_state_covers_the_visible_text() -> None:
    async with make_harness(FakeBackend("It was")) as harness:
        first = await harness.say(5, max_tokens=50)
        assert first.finished.reason is FinishReason.STOP
        log = await harness.store.read_log(KEY)
        assert log == (EOT, 5, *harness.backend.script_ids[:-1])
        snapshot = await harness.snapshot()
        assert (snapshot.header.pending_id, snapshot.header.position) == (None, len(log))
        with pytest.raises(InvalidRequest, match="input must not be empty") as caught:
            await harness.open()
        assert caught.value.param == "input"
        await harness.say(9)
        assert harness.backend.requests[1].prompt_ids == (9,)


async def test_a_first_turn_needs_input() -> None:
    async with make_harness() as harness:
        with pytest.raises(InvalidRequest, match="input must not be empty"):
            await harness.open()
        assert harness.turns.num_running == 0
        await harness.say(5)


async def test_M5_the_first_seed_is_the_sessions_until_a_turn_brings_its_own() -> None:
    async with make_harness() as harness:
        await harness.say(5)  # seed 77 was drawn, not given
        await harness.open(6, sampling=SamplingParams(max_tokens=2, seed=1234))
        await harness.turns.drain(grace_s=5.0)
        harness.turns = harness.make_turns(harness.backend)
        await harness.say(7, seed=5)
        await harness.say(8, sampling=SamplingParams(max_tokens=2, seed=4321))
        assert [request.sampling.seed for request in harness.backend.requests] == [77, 77, 5, 5]
        assert (await harness.snapshot()).header.sampler.seed == 5


async def test_penalty_counts_go_on_from_the_snapshot() -> None:
    async with make_harness() as harness:
        await harness.say(5, max_tokens=2)
        await harness.say(6, max_tokens=1)
        first, second = harness.backend.script_ids[:2]
        assert harness.backend.requests[1].resume is not None
        assert dict(harness.backend.requests[1].resume.generated_counts) == {first: 1, second: 1}
        assert dict((await harness.snapshot()).header.sampler.generated_counts) == {first: 2, second: 1}


async def test_P5_P6_a_second_turn_at_once_is_refused_and_loses_nothing() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        with pytest.raises(SessionBusy, match="'s1' is busy") as caught:
            await harness.open(6)
        assert caught.value.retry_after_s > 0
        await harness.create("s2")
        other = await harness.open(7, key=SessionKey("default", "s2"))
        harness.backend.release_all()
        assert (await collect(turn))[1].head.version == 1
        assert (await collect(other))[1].head.version == 1
        assert (await harness.say(6)).head.version == 2


async def test_the_session_is_free_before_the_last_event_is_out() -> None:
    async with make_harness() as harness:
        turn = await harness.open(5)
        async for event in turn.events():
            if isinstance(event, TurnOutcome):
                assert (await harness.store.get(KEY)).version == 1
                assert (await harness.say(6)).head.version == 2


async def test_expected_version_must_be_the_heads() -> None:
    async with make_harness() as harness:
        await harness.say(5, expected_version=0)
        with pytest.raises(VersionConflict, match="is at version 1, expected_version was 0"):
            await harness.open(6, expected_version=0)
        assert (await harness.say(6, expected_version=1)).head.version == 2


async def test_an_unknown_session_is_refused_before_the_stream() -> None:
    async with make_harness() as harness:
        with pytest.raises(NotFound):
            await harness.open(5, key=SessionKey("default", "nobody"))
        with pytest.raises(NotFound):
            await harness.open(5, key=SessionKey("other", "s1"))
        assert harness.turns.num_running == 0


async def test_a_refusal_of_the_engine_frees_the_session() -> None:
    async with make_harness() as harness:
        harness.backend.refusal = Overloaded("the queue is full")
        with pytest.raises(Overloaded):
            await harness.open(5)
        harness.backend.refusal = None
        assert (await harness.say(5)).head.version == 1


async def test_what_was_resumed_and_committed_is_counted() -> None:
    async with make_harness() as harness:
        await harness.say(5)
        await harness.say(6)
        with pytest.raises(NotFound):
            await harness.open(6, key=SessionKey("default", "nobody"))
        harness.store.commit_error = VersionConflict("moved on")
        await harness.say(7)
        resumed = [harness.sample("nsm_session_resume_total", outcome=outcome) for outcome in ("hit", "miss")]
        assert resumed == [2, 1]
        assert harness.sample("nsm_state_commit_seconds_count") == harness.sample("nsm_state_bytes_count") == 2
        assert harness.sample("nsm_state_fetch_seconds_count") == 3
        assert harness.sample("nsm_commit_conflict_total") == 1
        assert harness.sample("nsm_request_success_total", finished_reason="length") == 2


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
    async with make_harness(FakeBackend(hold=True)) as harness:
        num_committed = 0
        for input_ids, max_tokens, cancel_after in turns:
            turn = await harness.open(*input_ids, max_tokens=max_tokens)
            events = turn.events()
            if cancel_after is None:
                harness.backend.release(max_tokens)
            else:
                harness.backend.release(min(cancel_after, max_tokens))
                seen = [await anext(events) for _ in range(min(cancel_after, max_tokens))]
                assert not any(isinstance(event, TurnOutcome) for event in seen)
                await harness.turns.cancel(KEY)
            end = [event async for event in events][-1]
            assert isinstance(end, TurnOutcome)
            num_committed += end.finished.reason is not FinishReason.ABORT
            harness.backend.forget_permits()
        head = await harness.store.get(KEY)
        assert head.version == num_committed
        if num_committed:
            log = await harness.store.read_log(KEY)
            snapshot = await harness.snapshot()
            fed = log if snapshot.header.pending_id is None else log[:-1]
            assert snapshot.state == state_after(fed)
            assert log[len(fed) :] in ((), (snapshot.header.pending_id,))


async def test_P5_a_turn_of_another_process_makes_the_session_busy() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        other = harness.make_turns(harness.backend)  # its own claims, the same store
        with pytest.raises(SessionBusy, match="'s1' is busy") as caught:
            await other.open_turn(make_request(6))
        assert 0 < caught.value.retry_after_s <= 1.0
        harness.backend.release_all()
        assert (await collect(turn))[1].head.version == 1
        assert (await collect(await other.open_turn(make_request(6))))[1].head.version == 2
