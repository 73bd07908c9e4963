"""How long the stages of a start take, for one line of the log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/self/stat")
START_FIELD = 19  # behind the command's name, in ticks since the machine started


class StageTimes:
    """As text: `imports 2.1 s, model 0.4 s`. Stages follow each other from `began` on."""

    def __init__(self, began: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`began`: a reading of the clock; None: now."""
        self._clock = clock
        self._began = self._last = clock() if began is None else began
        self._stages: list[str] = []

    def ended(self, stage: str) -> None:
        """The stage ends now."""
        now = self._clock()
        self._stages.append(f"{stage} {now - self._last:.1f} s")
        self._last = now

    @property
    def seconds(self) -> float:
        """Up to the end of the last stage."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(self._stages)


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        ticks = int(STAT.read_text().rpartition(")")[2].split()[START_FIELD])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
