"""States that wait on the worker for their next turn."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict

from nsm_core.stats import StateCacheStats


class StateCache:
    """The most recently used states, bounded in bytes, by the digest of their content. Any thread may call it."""

    def __init__(self, max_bytes: int) -> None:
        self._states: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self._stats = StateCacheStats(max_bytes=max_bytes)
        self._lock = threading.Lock()

    def put(self, state_id: str, state: bytes) -> None:
        """Keeps it, and gives up the oldest for it; one that is larger than all the room is not kept."""
        with self._lock:
            stats = self._stats
            if state_id in self._states:
                self._states.move_to_end(state_id)
                return
            if len(state) > stats.max_bytes:
                return
            self._states[state_id] = state
            stats.num_bytes += len(state)
            while stats.num_bytes > stats.max_bytes:
                stats.num_bytes -= len(self._states.popitem(last=False)[1])
                stats.num_evicted += 1
            stats.num_states = len(self._states)

    def get(self, state_id: str) -> bytes | None:
        """Counts as a hit or a miss."""
        with self._lock:
            state = self._states.get(state_id)
            if state is None:
                self._stats.num_misses += 1
                return None
            self._stats.num_hits += 1
            self._states.move_to_end(state_id)
            return state

    def stats(self) -> StateCacheStats:
        """A copy of the counters."""
        with self._lock:
            return dataclasses.replace(self._stats)
