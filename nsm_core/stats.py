"""Plain numbers the engine knows, for whoever publishes them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters rise for ever; gauges say what holds now."""

    num_running: int = 0  # gauge: requests that hold a slot
    num_waiting: int = 0  # gauge: requests in the queue
    max_slots: int = 0  # gauge: rows of the state pool
    state_pool_bytes: int = 0  # gauge
    num_steps: int = 0  # counter
    step_seconds: float = 0.0  # counter
    tokens_computed: int = 0  # counter: prompt tokens the model read
    tokens_resumed: int = 0  # counter: prompt tokens covered by a resumed state
    tokens_generated: int = 0  # counter


@dataclasses.dataclass(slots=True, kw_only=True)
class StateCacheStats:
    """Of the states that a worker keeps for the next turn."""

    num_states: int = 0  # gauge
    num_bytes: int = 0  # gauge
    max_bytes: int = 0  # gauge
    num_hits: int = 0  # counter: asked for by id, and there
    num_misses: int = 0  # counter: asked for by id, and not there
    num_evicted: int = 0  # counter: given up for newer ones
