"""Two results beside each other: ratios, with what the spread of both leaves of them."""

from __future__ import annotations

import dataclasses
import math

from nsm_core.errors import ConfigError
from service.bench.result import BenchResult, Measure

SAME_MACHINE = ("cpu", "num_cpus", "memory_mb", "system")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of both. `ratio`: how many times as good the second is; 2.0: twice as fast, or half as big.

    `low`, `high`: the ratio between the quartiles that are farthest apart.
    """

    name: str
    unit: str
    first: float
    second: float
    ratio: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the middle halves of the values do not overlap."""
        return self.low > 1.0 or self.high < 1.0


def compare(first: BenchResult, second: BenchResult) -> list[Comparison]:
    """Of the measures that both have. Raises ConfigError when they have none."""
    theirs = second.by_name()
    found = [_compared(mine, theirs[mine.name]) for mine in first.measures if mine.name in theirs]
    if not found:
        raise ConfigError("the two results have no measure in common")
    return found


def differences(first: BenchResult, second: BenchResult) -> list[str]:
    """What else differs, so that a ratio may not be what it seems; one line each."""
    found = []
    for name in SAME_MACHINE:
        if first.machine.get(name) != second.machine.get(name):
            found.append(f"machine: {name} is {first.machine.get(name)} and {second.machine.get(name)}")
    for name in sorted({*first.options, *second.options}):
        if first.options.get(name) != second.options.get(name):
            found.append(f"options: {name} is {first.options.get(name)} and {second.options.get(name)}")
    return found


def _compared(first: Measure, second: Measure) -> Comparison:
    def goodness(one: float, other: float) -> float:
        better, worse = (other, one) if first.better == "more" else (one, other)
        return 1.0 if better == worse else math.inf if not worse else better / worse

    (low, high), (other_low, other_high) = first.quartiles, second.quartiles
    bounds = sorted((goodness(high, other_low), goodness(low, other_high)))
    return Comparison(
        name=first.name,
        unit=first.unit,
        first=first.median,
        second=second.median,
        ratio=goodness(first.median, second.median),
        low=bounds[0],
        high=bounds[1],
    )
