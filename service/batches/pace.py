"""How many lines run at once: live requests come first.

- While no live request is there, lines take half of the slots.
- Lines that run go on when a live request comes. Beside it none begins while another runs, so that a batch gets on.
- When a live request waits for a slot, the newest lines give theirs up, and are run again later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from service.backends.base import InferenceBackend

CHECK_S = 0.05  # between two looks at the engine


class LinePace:
    """Of all batches of one process."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend
        self._running: dict[asyncio.Task[object], int] = {}  # with the engine's requests of each, the oldest first

    @property
    def num_live(self) -> int:
        """Requests in the engine that are none of these lines'."""
        stats = self._backend.stats()
        return max(0, stats.num_running + stats.num_waiting - sum(self._running.values()))

    async def wait_for_room(self) -> None:
        """Returns when one more line may begin."""
        while not self._has_room():
            if self._running:
                await asyncio.wait(self._running, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(CHECK_S)

    def _has_room(self) -> bool:
        return len(self._running) < self._num_allowed() if self._running else not self._is_crowded()

    def _num_allowed(self) -> int:
        return 1 if self.num_live else max(1, self._backend.stats().max_slots // 2)

    def _is_crowded(self) -> bool:
        return self._backend.stats().num_waiting > 0 and self.num_live > 0

    def add(self, task: asyncio.Task[object], *, num_requests: int) -> None:
        """A line that has begun; it counts until its task ends."""
        self._running[task] = num_requests
        task.add_done_callback(lambda ended: self._running.pop(ended, None))

    @contextlib.asynccontextmanager
    async def yielding_slots(self) -> AsyncIterator[None]:
        """Inside, lines give their slots up to live requests that wait."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait((watch,))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self._running and self._is_crowded():
                next(reversed(self._running)).cancel()
