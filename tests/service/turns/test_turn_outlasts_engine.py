"""A turn that nobody could send again, and whose engine ends."""

from __future__ import annotations

import asyncio

import pytest

from nsm_core.errors import EngineDead, TurnCancelled
from service.turns import execution
from service.turns.codec import decode_tokens
from service.turns.execution import MAX_RESTARTS
from service.turns.turn import HandedOver
from tests.support.fakes import FakeBackend
from tests.support.turns import KEY, collect, make_harness


def failing() -> FakeBackend:
    """Its requests end after two tokens, as when their engine does."""
    return FakeBackend(fail_after=2, error=EngineDead("the engine's process ended"))


async def has_ended(backend: FakeBackend) -> None:
    while backend.running:  # noqa: ASYNC110  # other tasks of this loop make it true
        await asyncio.sleep(0)


async def test_P3_it_goes_on_after_its_tokens_once_an_engine_is_there() -> None:
    async with make_harness() as harness:
        expected = (await collect(await harness.open(5, 6)))[0]
    backend = failing()
    async with make_harness(backend) as harness:
        turn = await harness.open(5, 6, outlasts_engine=True)
        backend.is_full = True
        await has_ended(backend)
        backend.fail_after, backend.is_full = None, False
        tokens, end = await collect(turn)
        assert (tokens, end.error, end.head.version) == (expected, None, 1)
        first, second = backend.requests
        assert (first.sampled_ids, len(second.sampled_ids)) == ((), 2)


async def test_P3_one_that_ends_every_engine_fails_after_a_few() -> None:
    backend = failing()
    async with make_harness(backend) as harness:
        tokens, end = await collect(await harness.open(5, outlasts_engine=True))
        assert (len(tokens), end.head.version, type(end.error)) == (2, 0, EngineDead)
        assert str(end.error).startswith("the engine's process ended, as 2 others before it; nothing was kept: ")
        assert len(backend.requests) == 1 + MAX_RESTARTS


async def test_P3_one_for_which_no_engine_comes_in_time_fails_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "ENGINE_BACK_S", 0.0)
    async with make_harness(failing()) as harness:
        _, end = await collect(await harness.open(5, outlasts_engine=True))
        assert str(end.error).startswith("the engine's process ended, and no other came within 0 s or before the ")
        assert str(end.error).endswith("send it again once /health/ready is 200")


async def test_P3_any_other_turn_ends_with_its_engine() -> None:
    backend = failing()
    async with make_harness(backend) as harness:
        assert isinstance((await harness.say(5)).error, EngineDead)
        assert len(backend.requests) == 1


async def test_P3_a_cancel_while_no_engine_is_there_ends_it() -> None:
    backend = failing()
    async with make_harness(backend) as harness:
        turn = await harness.open(5, outlasts_engine=True)
        backend.is_full = True
        await has_ended(backend)
        assert await harness.turns.cancel(KEY)
        assert isinstance((await collect(turn))[1].error, TurnCancelled)


async def test_P3_a_server_that_stops_while_no_engine_is_there_hands_it_over() -> None:
    backend = failing()
    async with make_harness(backend) as harness:
        turn = await harness.open(5, outlasts_engine=True, is_resumable=True)
        backend.is_full = True
        await has_ended(backend)
        await harness.turns.drain(grace_s=0.0)
        assert isinstance((await collect(turn))[1].error, HandedOver)
        record = await harness.store.get_turn(KEY, turn_id="r1")
        assert record is not None
        assert (record.status, record.lease_left_s) == ("running", 0.0)
        assert sum(len(decode_tokens(chunk)) for chunk in record.chunks) == 2
