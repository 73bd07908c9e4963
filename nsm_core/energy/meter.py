"""The seam to whatever measures energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nsm_core.stats import EnergyUse


class EnergyMeter(Protocol):
    """Implementations: `nvml` (GPUs), `rapl` (CPUs and memory), `estimate` (of a CPU), `CombinedMeter`."""

    def read(self) -> tuple[EnergyUse, ...]:
        """Joules since the meter was made, an entry for each source, always in the same order; never fewer than before.

        Costs tens of microseconds: not for every token.
        """
        ...

    def close(self) -> None:
        """Idempotent; nothing is read afterwards."""
        ...


class CombinedMeter:
    """Several meters of different sources as one."""

    def __init__(self, meters: Sequence[EnergyMeter]) -> None:
        self._meters = tuple(meters)

    def read(self) -> tuple[EnergyUse, ...]:
        return tuple(use for meter in self._meters for use in meter.read())

    def close(self) -> None:
        for meter in self._meters:
            meter.close()
