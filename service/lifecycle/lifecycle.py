"""What a graceful stop needs to know: whether new work is taken, and when the running work is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Lifecycle:
    """Lives on the event loop of one application."""

    def __init__(self) -> None:
        self._is_draining = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_draining(self) -> bool:
        """True once the server refuses new work."""
        return self._is_draining

    @property
    def num_active(self) -> int:
        """Pieces of work under way, see `track`."""
        return self._num_active

    def begin_drain(self) -> None:
        """From now on new work is refused; what runs goes on. Idempotent."""
        self._is_draining = True

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Around every piece of work that a stop shall wait for: a request, or a turn whose client has left."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all tracked work ended within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
