"""Whether a build is slower than another: a decision on paired rounds that noise alone rarely brings about.

A round's loss is how many times as much the new build needed as the base did right beside it. A measure is lost when
its middle loss is above the tolerance *and* the losses are above 1 beyond doubt: a bound for their median, taken from
their order alone, so that one disturbed round counts no more than any other. All measures together are refused for
nothing in at most `DOUBT` of all runs.
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
# Per CPU second: what a neighbour takes of the machine does not count.
CPU_MEASURES = ("*.tokens_per_cpu_s", "session.*.resumed_cpu_ms")
WALL_MEASURES = ("*.tokens_per_s", "session.*.resumed_ms")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One measure. `losses`: of each round, above 1 where the new build is worse; `bound`: their median is above it."""

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

    Raises ConfigError when there is nothing to decide on, or for too few rounds.
    """
    patterns, theirs = list(wanted), {measure.name: measure for measure in new}
    pairs = [
        (mine, theirs[mine.name])
        for mine in base
        if mine.name in theirs and any(fnmatch.fnmatch(mine.name, pattern) for pattern in patterns)
    ]
    if not pairs:
        raise ConfigError("the two builds have no measure in common that the gate looks at")
    return [_decide(mine, other, doubt=DOUBT / len(pairs), tolerance=tolerance) for mine, other in pairs]


def rounds_needed(num_measures: int) -> int:
    """So few cannot refuse anything: even if all were losses, chance might have done it."""
    return math.ceil(math.log2(num_measures / DOUBT))


def bound_rank(num_rounds: int, doubt: float) -> int:
    """The rank (1: the least) of the value that the median lies above, but for `doubt`; 0 when there is none."""
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
