"""State of a graceful stop: whether new work is accepted, and when the running work has ended."""

from __future__ import annotations

import asyncio

EXIT_INTERRUPTED = 130  # the status of a server that a second Ctrl+C ended
INTERRUPTED = "ended by a second Ctrl+C: running requests were cut off, and what was committed is stored"
FINAL_FRAMES_S = 2.0  # to write the last frames of requests that were cut off
WORKER_END_S = 5.0  # beyond the grace time, for a worker's last frames and its end


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
        """Tracked pieces of work that run now."""
        return self._num_active

    def begin_drain(self) -> None:
        """Refuse new work; running work continues. Idempotent."""
        self._is_draining = True

    def track(self) -> Tracked:
        """Around work that a stop waits for: a request, or a turn whose client has left."""
        return Tracked(self)

    def begin(self) -> None:
        """A piece of work begins; `end` follows in every case."""
        self._num_active += 1
        self._idle.clear()

    def end(self) -> None:
        """A piece of work has ended."""
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


class Tracked:
    """One piece of work, inside `with`."""

    __slots__ = ("_lifecycle",)

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def __enter__(self) -> None:
        self._lifecycle.begin()

    def __exit__(self, *error: object) -> None:
        self._lifecycle.end()
