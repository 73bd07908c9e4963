"""Energy of a CPU where nothing measures it: its time, times a power."""

from __future__ import annotations

import time
from collections.abc import Callable

from nsm_core.stats import EnergyUse

# Of one busy core, memory and losses included: about what servers of these years take under load, by the core.
CORE_WATTS = 10.0


class EstimateMeter:
    """CPU seconds of this process, all threads, times the power of one core. Good for comparing, not for a bill."""

    def __init__(self, core_watts: float = CORE_WATTS, *, cpu_time: Callable[[], float] = time.process_time) -> None:
        self._core_watts = core_watts
        self._cpu_time = cpu_time
        self._start = cpu_time()

    def read(self) -> tuple[EnergyUse, ...]:
        joules = self._core_watts * (self._cpu_time() - self._start)
        return (EnergyUse(source="cpu", method="estimate", joules=joules),)

    def close(self) -> None:
        """Nothing is held open."""
