"""Decides whether a build is slower than another, from paired rounds.

A round's loss is the cost of the new build over the cost of the base in the same round. A measure is lost if its
median loss exceeds the tolerance *and* a lower confidence bound of the median exceeds 1. The bound uses ranks alone, so
one disturbed round counts no more than any other. The false alarm rate of all measures together is at most `DOUBT`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Iterable, Sequence

from nsm_core.errors import ConfigError
from nsm_lab.bench.result import Measure

DOUBT = 0.05
# Per CPU second: neighbours on the machine do not count.
CPU_MEASURES = ("*.tokens_per_cpu_s", "session.*.resumed_cpu_ms")
WALL_MEASURES = ("*.tokens_per_s", "session.*.resumed_ms")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One measure. `losses`: one per round, above 1 if the new build is worse; `bound`: lower bound of their median."""

    name: str
    unit: str
    base: float
    new: float
    losses: tuple[float, ...]
    bound: float
    is_lost: bool

    @property
    def loss(self) -> float:
        return statistics.median(self.losses)


def decide(
    base: Sequence[Measure], new: Sequence[Measure], *, wanted: Iterable[str], tolerance: float
) -> list[Verdict]:
    """Verdicts on the measures that match `wanted` and that both have; round i of one belongs to round i of the other.

    Raises ConfigError if no measure matches, or for too few rounds.
    """
    patterns, theirs = list(wanted), {measure.name: measure for measure in new}
    pairs = [
        (mine, theirs[mine.name])
        for mine in base
        if mine.name in theirs and any(fnmatch.fnmatch(mine.name, pattern) for pattern in patterns)
    ]
    if not pairs:
        raise ConfigError("the two builds have no measure in common that the gate uses")
    return [_decide(mine, other, doubt=DOUBT / len(pairs), tolerance=tolerance) for mine, other in pairs]


def rounds_needed(num_measures: int) -> int:
    """The smallest number of rounds that can refuse a build: with fewer, chance explains even losses in all rounds."""
    return math.ceil(math.log2(num_measures / DOUBT))


def bound_rank(num_rounds: int, doubt: float) -> int:
    """Rank (1: smallest) of the value that the median exceeds with confidence 1 - `doubt`; 0 if there is none."""
    tail, rank = 0.0, 0
    while rank < num_rounds:
        tail += math.comb(num_rounds, rank) / 2**num_rounds
        if tail > doubt:
            break
        rank += 1
    return rank


def _decide(base: Measure, new: Measure, *, doubt: float, tolerance: float) -> Verdict:
    if len(base.values) != len(new.values):
        raise ConfigError(f"{base.name} has {len(base.values)} rounds of one build and {len(new.values)} of the other")
    rank = bound_rank(len(base.values), doubt)
    if not rank:
        needed = math.ceil(-math.log2(doubt))
        raise ConfigError(f"{len(base.values)} rounds cannot tell a loss from chance here; at least {needed} can")
    losses = tuple(_loss(*pair, base.better) for pair in zip(base.values, new.values, strict=True))
    bound = sorted(losses)[rank - 1]
    return Verdict(
        name=base.name,
        unit=base.unit,
        base=base.median,
        new=new.median,
        losses=losses,
        bound=bound,
        is_lost=bound > 1.0 and statistics.median(losses) > 1.0 + tolerance,
    )


def _loss(base: float, new: float, better: str) -> float:
    worse, good = (base, new) if better == "more" else (new, base)
    return 1.0 if worse == good else math.inf if not good else worse / good
