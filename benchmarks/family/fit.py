"""How time grows with length: the exponent of a power law, with its confidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Two-sided 95 % quantiles of Student's t, by degrees of freedom
_T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
MIN_POINTS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Exponent:
    """time ~ length ** value, fitted to `points` lengths; `half_width` of its 95 % interval."""

    value: float
    half_width: float
    points: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.half_width:.2f}"


def fit_exponent(lengths: Sequence[float], times: Sequence[float]) -> Exponent | None:
    """Least squares on logarithms; None for fewer than `MIN_POINTS` points.

    The interval says how straight the line is. It knows nothing of what lies outside the lengths.
    """
    if len(lengths) < MIN_POINTS:
        return None
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(times, dtype=float))
    x = x - x.mean()
    slope = float((x * y).sum() / (x * x).sum())
    residuals = y - y.mean() - slope * x
    freedom = len(lengths) - 2
    error = float(np.sqrt((residuals**2).sum() / freedom / (x * x).sum()))
    return Exponent(slope, _T_95.get(freedom, 2.0) * error, len(lengths))
