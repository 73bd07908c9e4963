"""Clients that leave their turn."""

from __future__ import annotations

import asyncio

import pytest

from nsm_core.engine.request import FinishReason
from nsm_core.errors import (
    TurnCancelled,
)
from tests.support.fakes import FakeBackend
from tests.support.turns import KEY, collect, make_harness


async def test_S6_a_client_that_leaves_does_not_stop_its_turn() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        harness.backend.release()
        events = turn.events()
        await anext(events)
        await events.aclose()
        assert harness.turns.num_running == 1
        harness.backend.release_all()
        await turn.ended.wait()
        assert (await harness.store.get(KEY)).version == 1
        assert harness.backend.num_cancels == 0


async def test_a_turn_that_goes_on_without_its_client_keeps_the_server_from_stopping() -> None:
    async with make_harness(FakeBackend(hold=True)) as harness:
        turn = await harness.open(5)
        await harness.backend.held.wait()
        turn.detach()
        assert harness.sample("nsm_turns_detached") == 1
        assert not await harness.lifecycle.wait_idle(0.0)
        harness.backend.release_all()
        assert await harness.lifecycle.wait_idle(5.0)
        assert harness.sample("nsm_turns_detached") == 0


async def test_a_turn_without_its_client_is_stopped_after_detached_s() -> None:
    async with make_harness(FakeBackend(hold=True), detached_s=0.01) as harness:
        turn = await harness.open(5)
        await harness.backend.held.wait()
        assert not turn.ended.is_set()  # with its client it may take any time
        turn.detach()
        turn.detach()
        await turn.ended.wait()
        assert turn.end is not None
        assert turn.end.finished.reason is FinishReason.ABORT
        assert isinstance(turn.end.error, TurnCancelled)
        assert harness.backend.num_cancels == 1
        assert (await harness.store.get(KEY)).version == 0


async def test_detaching_after_the_end_does_nothing() -> None:
    async with make_harness(detached_s=0.0) as harness:
        turn = await harness.open(5)
        await turn.ended.wait()
        turn.detach()
        await asyncio.sleep(0.001)
        assert harness.backend.num_cancels == 0
        assert (await collect(turn))[1].head.version == 1


async def test_a_client_that_leaves_before_its_turn_is_open_leaves_the_session_free() -> None:
    async with make_harness() as harness:
        opening = asyncio.create_task(harness.open(5))
        await asyncio.sleep(0)
        assert harness.turns.num_running == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert harness.turns.num_running == 0
        assert (await harness.say(5)).head.version == 1
