"""Tasks that outlive their request, but not the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def running(endless: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """While inside, the coroutine runs; it is cancelled at the end. What it raised by then is raised there."""
    task = asyncio.create_task(endless)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Background:
    """Lives on the event loop of one application."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Waits until all tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
