"""An idle engine gives memory back to the system."""

from __future__ import annotations

import time
from collections.abc import Callable

from nsm_core.heap import give_back_code, trim_heap
from nsm_core.state.pool import StatePool

# Without a request for so long it is idle: the first request after that takes some milliseconds longer.
AFTER_S = 10.0
# Without one for so long it prepares what its start has left: for a part of that a request waits, 0.03 s at most times.
PREPARE_AFTER_S = 0.1


class Rest:
    """Gives the memory of rows and of the heap back, once in each time without requests, and the code of libraries:
    most of it only the start has run, or requests that are over. On the engine's thread.
    """

    def __init__(self, pool: StatePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._since: float | None = None
        self._has_rested = False

    def used(self) -> None:
        """A request has come."""
        self._since, self._has_rested = None, False

    @property
    def idle_s(self) -> float:
        """Since the first turn without a request; 0 while there is one."""
        return 0.0 if self._since is None else self._clock() - self._since

    def turn(self, *, has_work: bool) -> None:
        """After each turn of the engine."""
        if has_work:
            self._since = None
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if not self._has_rested and now - self._since >= AFTER_S:
            self._has_rested = True
            self._pool.give_back()
            trim_heap()
            give_back_code()
