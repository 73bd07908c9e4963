"""Means over documents with their 95 % intervals."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
# Of the numerical integral below: the quantile is right to five digits.
_GRID = 100_001


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over documents; `low` and `high` bound its 95 % interval.

    Both are None with a single document, which says nothing of the spread. `per_document`: the values, for a paired
    comparison of two models on the same documents.
    """

    mean: float
    low: float | None
    high: float | None
    per_document: tuple[float, ...]

    def exceeds(self, chance: float) -> bool:
        """Whether the whole interval lies above `chance`: otherwise nothing was found."""
        return self.low is not None and self.low > chance


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Of values of any size, one for each document: Student's t."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Estimate(mean=mean, low=None, high=None, per_document=tuple(values))
    half = student_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean=mean, low=mean - half, high=mean + half, per_document=tuple(values))


def share_estimate(shares: Sequence[float]) -> Estimate:
    """Of shares in [0, 1], one for each document: Wilson's interval, with documents for trials.

    Prompts in one document are not independent, so a document counts once however many prompts it has. Unlike
    Student's t the interval has a width when all shares are 0 or 1.
    """
    count, mean = len(shares), math.fsum(shares) / len(shares)
    if count < 2:
        return Estimate(mean=mean, low=None, high=None, per_document=tuple(shares))
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    # rounding must not lift the bound off an end that was observed
    return Estimate(
        mean=mean,
        low=0.0 if mean == 0 else low,
        high=1.0 if mean == 1 else high,
        per_document=tuple(shares),
    )


@functools.cache
def student_quantile(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t with `freedom` degrees of freedom.

    With t = sqrt(freedom) tan(angle) the density is proportional to cos(angle)^(freedom - 1) on [0, pi / 2).
    """
    angle = np.linspace(0.0, np.pi / 2, _GRID)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE * mass[-1], mass, angle)))
