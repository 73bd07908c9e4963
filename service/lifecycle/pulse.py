"""Signs of life that a child process gives its supervisor, on a pipe: a process that was stopped gives none."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

SILENT_S = 60.0  # as long as a step may hang: the next process has to load the model
SAMPLE_S = 1.0  # between two looks; the child is to beat about as often


class Pulse:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        """`fd`: for writing."""
        os.set_blocking(fd, False)
        self._fd = fd

    def beat(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a supervisor that does not look, or is gone
            os.write(self._fd, b".")

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """The running event loop beats while the block runs: no beat comes where it is stuck."""
        task = asyncio.create_task(self._beat_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _beat_on(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(SAMPLE_S)


async def falls_silent(
    fd: int, *, limit_s: float = SILENT_S, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> bool:
    """The supervisor's end, which it closes. True after `limit_s` without a sign since the first one, False at the
    child's end. `pause`: waits so many seconds.

    Only the time of its own looks counts: where both processes were frozen, nobody has been silent.
    """
    os.set_blocking(fd, False)
    silent_s, has_begun = 0.0, False
    try:
        while silent_s < limit_s:
            await pause(SAMPLE_S)
            try:
                if not os.read(fd, 4096):
                    return False
                silent_s, has_begun = 0.0, True
            except BlockingIOError:
                silent_s += SAMPLE_S if has_begun else 0.0
        return True
    finally:
        os.close(fd)
