from __future__ import annotations

import asyncio

from service.lifecycle.lifecycle import Lifecycle


async def test_idle_until_something_is_tracked_and_after_all_of_it_ended() -> None:
    lifecycle = Lifecycle()
    assert await lifecycle.wait_idle(0.0)
    with lifecycle.track():
        with lifecycle.track():
            assert not await lifecycle.wait_idle(0.001)
        assert not await lifecycle.wait_idle(0.001)
        waiting = asyncio.create_task(lifecycle.wait_idle(10))
        await asyncio.sleep(0)
    assert await waiting


async def test_work_that_fails_has_ended_too() -> None:
    lifecycle = Lifecycle()
    try:
        with lifecycle.track():
            raise ValueError
    except ValueError:
        pass
    assert await lifecycle.wait_idle(0.0)


async def test_draining_is_for_good() -> None:
    lifecycle = Lifecycle()
    assert not lifecycle.is_draining
    lifecycle.begin_drain()
    lifecycle.begin_drain()
    assert lifecycle.is_draining
