"""Compares two results: ratios of medians, with bounds from the spread of both.

Two consecutive runs differ by more than the spread within each, because the machine drifts between them. So a
difference is clear only if it exceeds the spread *and* the difference between two runs of one build. Twelve pairs of
identical servers on two shared cores, four repeats each, were up to 1.5 times apart by the clock, 1.3 in CPU time and
1.02 in memory where their spreads did not meet; with the limits here none of their 372 rows is clear.
"""

from __future__ import annotations

import dataclasses
import math

from nsm_core.errors import ConfigError
from nsm_lab.bench.result import BenchResult, Measure

SAME_MACHINE = ("cpu", "num_cpus", "memory_mb", "system")
# Two runs of one build differ by up to these ratios on a shared machine.
CLOCK_DRIFT, CPU_DRIFT, MEMORY_DRIFT = 1.5, 1.3, 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of both. `ratio`: how many times as good the second is; 2.0: twice as fast, or half as big.

    `low`, `high`: the ratios between the values that are farthest apart.
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
        """Whether all values of one are better than any of the other, and their medians differ beyond drift."""
        limit = drift_of(self.name)
        return (self.low > 1.0 and self.ratio > limit) or (self.high < 1.0 and self.ratio < 1 / limit)


def drift_of(name: str) -> float:
    """The ratio of medians that a measure must exceed to count as different."""
    figure = name.rpartition(".")[2]
    if figure.endswith("_mb") or figure == "ratio":  # of memory over the model's bytes
        return MEMORY_DRIFT
    return CPU_DRIFT if "cpu" in figure else CLOCK_DRIFT


def compare(first: BenchResult, second: BenchResult) -> list[Comparison]:
    """Compares the measures that both have. Raises ConfigError if they have none in common."""
    theirs = second.by_name()
    compared = [_compared(mine, theirs[mine.name]) for mine in first.measures if mine.name in theirs]
    if not compared:
        raise ConfigError("the two results have no measure in common")
    return compared


def differences(first: BenchResult, second: BenchResult) -> list[str]:
    """Differences of machines and options that make ratios misleading, one line each."""
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

    least, most = min(first.values), max(first.values)
    bounds = sorted((goodness(most, min(second.values)), goodness(least, max(second.values))))
    return Comparison(
        name=first.name,
        unit=first.unit,
        first=first.median,
        second=second.median,
        ratio=goodness(first.median, second.median),
        low=bounds[0],
        high=bounds[1],
    )
