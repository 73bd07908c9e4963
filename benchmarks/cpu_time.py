"""CPU time of one thing again and again: other programs on the machine do not count."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return times[1:]
