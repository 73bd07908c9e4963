"""What a turn starts from: the session's own state or, when that is lost, its log; never anything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsm_core.errors import (
    InvalidRequest,
    SnapshotCorrupt,
    StateMismatch,
)
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import BpeTokenizer
from tests.support.fakes import FakeBackend, state_after
from tests.support.stored_rows import damage_snapshot, get_chunk, lease_holder, put_chunk, put_snapshot
from tests.support.turns import KEY, collect, make_harness, make_request


async def test_R2_a_state_at_another_place_than_its_header_says_is_told_with_its_session() -> None:
    async with make_harness() as harness:
        await harness.say(5, 6)
        snapshot = await harness.snapshot()
        wrong = Snapshot(snapshot.header, snapshot.state[:32] + bytes(len(snapshot.state) - 32))
        await put_snapshot(harness.store, wrong.encode())
        with pytest.raises(SnapshotCorrupt, match="session 's1': the state was not reached"):
            await harness.open(9)


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
    async with make_harness() as harness:
        await harness.say(5, 6)
        snapshot = await harness.snapshot()
        wrong = Snapshot(dataclasses.replace(snapshot.header, **changes), snapshot.state)
        await put_snapshot(harness.store, wrong.encode())
        error = StateMismatch if "tokenizer_fingerprint" in changes else SnapshotCorrupt
        with pytest.raises(error, match="session 's1'"):
            await harness.open(9)
        assert len(harness.backend.requests) == 1
        await put_snapshot(harness.store, snapshot.encode())
        assert (await harness.say(9)).head.version == 2


@pytest.mark.parametrize("reason", ["missing", "corrupt"])
@pytest.mark.parametrize("new_ids", [(), (9,)], ids=["0_new_tokens", "1_new_token"])
async def test_R3_a_lost_state_is_made_again_from_the_log_never_empty(reason: str, new_ids: tuple[int, ...]) -> None:
    async with make_harness() as harness, make_harness() as unbroken:
        for one in (harness, unbroken):
            await one.say(5, 6, max_tokens=2)
            await one.say(7, max_tokens=3)
        backend = harness.backend
        if reason == "missing":
            await put_snapshot(harness.store, None)
        else:
            await damage_snapshot(harness.store)
        turns = harness.make_turns(backend)
        turn = await turns.open_turn(make_request(*new_ids))
        end = (await collect(turn))[1]
        expected = await unbroken.say(*new_ids)
        assert (turn.rebuilt, end.error) == (reason, None)
        assert (end.head.version, end.head.position) == (expected.head.version, expected.head.position)
        log = await harness.store.read_log(KEY)
        assert log == await unbroken.store.read_log(KEY)
        snapshot, model = await harness.snapshot(), backend.model.fingerprint
        assert snapshot.state == state_after(log[:-1])
        assert snapshot.header.sampler == (await unbroken.snapshot()).header.sampler
        assert (snapshot.header.model_fingerprint, end.head.model_fingerprint) == (model, model)
        assert backend.requests[-1].prompt_ids == (*log[: len(log) - 4 - len(new_ids)], *new_ids)
        assert (end.finished.cached_tokens, expected.finished.cached_tokens) == (0, 8)
        assert end.finished.prompt_tokens == expected.finished.prompt_tokens
        assert harness.sample("nsm_session_resume_total", outcome=reason) == 1
        again = await turns.open_turn(make_request(8))
        assert (again.rebuilt, (await collect(again))[1].finished.cached_tokens) == (None, len(log) - 1)


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("has_tokenizer", [True, False])
async def test_R3_a_session_of_a_model_that_is_not_served_is_refused(has_state: bool, has_tokenizer: bool) -> None:
    """It never moves to another model by itself, and its own one goes on with it as if nothing had been."""
    async with make_harness() as harness:
        await harness.say(5, 6, max_tokens=2)
        if not has_state:
            await put_snapshot(harness.store, None)
        tokenizer = None if has_tokenizer else BpeTokenizer.train(["Hello there"], vocab_size=280)
        backend = FakeBackend(tokenizer=tokenizer, fingerprint="a newer model")
        before = await harness.store.get(KEY)
        with pytest.raises(StateMismatch, match="session 's1' was made by model") as caught:
            await harness.make_turns(backend).open_turn(make_request(9))
        assert "`nsm serve --model RUNNING --model before=DIRECTORY` also continues theirs" in str(caught.value)
        assert ("`nsm sessions migrate`" in str(caught.value)) is has_tokenizer
        assert (await harness.store.get(KEY)).version == before.version
        assert backend.requests == []
        assert harness.sample("nsm_session_resume_total", outcome="refused") == 1
        assert (await harness.say(9)).head.version == 2


async def test_a_session_without_a_text_may_be_any_models() -> None:
    async with make_harness() as harness:
        turn = await harness.make_turns(FakeBackend(fingerprint="a newer model")).open_turn(make_request(9))
        assert (await collect(turn))[1].head.model_fingerprint == "a newer model"


async def test_a_rebuilt_session_without_a_pending_token_still_needs_input() -> None:
    async with make_harness(FakeBackend("It was")) as harness:
        await harness.say(5, max_tokens=50)
        log = await harness.store.read_log(KEY)
        await put_snapshot(harness.store, None)
        with pytest.raises(InvalidRequest, match="input must not be empty"):
            await harness.open()
        await harness.say(9)
        assert harness.backend.requests[-1].prompt_ids == (*log, 9)


async def test_a_rebuilt_turn_draws_with_the_sessions_seed() -> None:
    async with make_harness() as harness:
        await harness.say(5, seed=1234)
        await put_snapshot(harness.store, None)
        await harness.say(6)
        assert harness.backend.requests[-1].sampling.seed == 1234
        assert (await harness.snapshot()).header.sampler.seed == 1234


async def test_a_rebuild_that_is_cancelled_leaves_everything_as_it_was() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        harness.backend.release(4)
        before = (await harness.say(5)).head
        await put_snapshot(harness.store, None)
        turn = await harness.open(6)
        await harness.backend.held.wait()
        assert await harness.turns.cancel(KEY)
        assert (await collect(turn))[1].head == before
        assert await lease_holder(harness.store) is None


async def test_a_log_that_is_damaged_as_well_is_an_error() -> None:
    async with make_harness() as harness:
        await harness.say(5)
        await put_snapshot(harness.store, None)
        version, ids = await get_chunk(harness.store)
        await put_chunk(harness.store, version, ids[:-4])
        with pytest.raises(SnapshotCorrupt, match="log of session 's1'"):
            await harness.open(9)
        await put_chunk(harness.store, version, ids)
        assert (await harness.say(9)).head.version == 2


async def test_a_state_of_another_numerics_class_is_used_and_said() -> None:
    async with make_harness() as harness:
        assert (await harness.open(5)).other_numerics is None
        await harness.turns.drain(grace_s=5.0)
        backend = FakeBackend()
        backend.model = dataclasses.replace(backend.model, numerics="other")
        turn = await harness.make_turns(backend).open_turn(make_request(6))
        assert turn.other_numerics == "fake"
        assert (await collect(turn))[1].head.version == 2
