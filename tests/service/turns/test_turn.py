"""Clients that leave their turn."""

from __future__ import annotations

import asyncio

import pytest

from nsm_core.engine.request import FinishReason
from nsm_core.errors import (
    TurnCancelled,
)
from tests.support.fakes import FakeBackend
from tests.support.turns import KEY, collect, make_house


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
        assert (await house.store.get(KEY)).version == 1
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
        assert (await house.store.get(KEY)).version == 0


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
