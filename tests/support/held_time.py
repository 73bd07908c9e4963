"""An event loop whose time passes only when a test says so.

Limits are then exact: none expires because the machine is busy, and none has to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

Result = TypeVar("Result")
ROUNDS = 5  # of the loop after each step: what a timer began is under way, sockets included


class HeldTime:
    """Seconds of the loop."""

    def __init__(self, now: float) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    async def advance(self, seconds: float) -> None:
        """Timers that are due then have run when this returns."""
        self._now += seconds
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    async def pass_until(self, waiting: Awaitable[Result], *, step_s: float) -> tuple[Result, float]:
        """What is waited for, and how many seconds passed until it came, in steps."""
        began, task = self._now, asyncio.ensure_future(waiting)
        while not task.done():
            await self.advance(step_s)
        return task.result(), self._now - began


@contextlib.contextmanager
def held_time() -> Iterator[HeldTime]:
    """Of the running loop. Afterwards its time passes by itself again, from where it was left."""
    loop = asyncio.get_running_loop()
    pass_by_itself = loop.time
    held = HeldTime(pass_by_itself())
    loop.time = held  # type: ignore[method-assign]
    try:
        yield held
    finally:
        ahead_s = held() - pass_by_itself()
        loop.time = lambda: pass_by_itself() + ahead_s  # type: ignore[method-assign]
