"""Energy of CPUs and memory, by the processors' own counters (RAPL) as Linux shows them.

The library for this, pyRAPL, has had no release since 2019, and those that live bring a whole carbon account with them;
it is two files for each counter.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from nsm_core.errors import ConfigError
from nsm_core.stats import EnergyUse, Source

POWERCAP = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:\d+(?::\d+)?")  # AMD's processors are shown under the same name


@dataclasses.dataclass(slots=True)
class _Zone:
    """One counter. It begins anew at `range_uj`, after minutes of hard work."""

    source: Source
    path: Path
    range_uj: int
    last_uj: int
    total_uj: int = 0

    def read(self) -> float:
        """Joules since the zone was opened."""
        now_uj = _number(self.path / "energy_uj")
        self.total_uj += (now_uj - self.last_uj) % self.range_uj
        self.last_uj = now_uj
        return self.total_uj / 1e6


class RaplMeter:
    """All packages and memories of this machine, whoever uses them. To be read once a minute at least."""

    def __init__(self, root: Path = POWERCAP, *, share: float = 1.0) -> None:
        """`share`: of what is counted, where several meters in as many processes are summed up.

        Raises ConfigError where there are no counters, or this user may not read them."""
        self._share = share
        try:
            names = sorted(path.name for path in root.iterdir() if _ZONE.fullmatch(path.name))
            self._zones = [zone for name in names if (zone := _open(root / name)) is not None]
        except (OSError, ValueError) as error:
            raise ConfigError(f"RAPL reports no energy: {error}") from error
        if not self._zones:
            raise ConfigError(f"RAPL reports no energy: no counter under {root}")

    def read(self) -> tuple[EnergyUse, ...]:
        joules: dict[Source, float] = {}
        for zone in self._zones:
            joules[zone.source] = joules.get(zone.source, 0.0) + zone.read()
        return tuple(
            EnergyUse(source=source, method="rapl", joules=value * self._share) for source, value in joules.items()
        )

    def close(self) -> None:
        """Nothing is held open."""


def _open(path: Path) -> _Zone | None:
    """None for a part of another zone: cores and graphics are counted in their package already."""
    name = (path / "name").read_text("ascii").strip()
    source: Source
    if name.startswith("package"):
        source = "cpu"
    elif name == "dram":
        source = "dram"
    else:
        return None
    return _Zone(source, path, _number(path / "max_energy_range_uj"), _number(path / "energy_uj"))


def _number(path: Path) -> int:
    return int(path.read_text("ascii"))
