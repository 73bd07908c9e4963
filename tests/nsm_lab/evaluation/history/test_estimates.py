from __future__ import annotations

import pytest

from nsm_lab.evaluation.history.estimates import mean_estimate, share_estimate, student_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (19, 2.09302), (99, 1.98422)]
)
def test_student_quantile_published_values_are_met(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_mean_estimate_has_students_interval() -> None:
    estimate = mean_estimate([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.per_document) == (2.0, (1.0, 2.0, 3.0))
    assert estimate.high == pytest.approx(2 + 4.30265 / 3**0.5, rel=1e-4)
    assert estimate.low == pytest.approx(2 - 4.30265 / 3**0.5, rel=1e-4)
    assert not estimate.exceeds(0.0)
    assert mean_estimate([1.9, 2.0, 2.1]).exceeds(0.0)


def test_estimate_of_one_document_has_no_interval_and_finds_nothing() -> None:
    for estimate in (mean_estimate([5.0]), share_estimate([1.0])):
        assert (estimate.low, estimate.high) == (None, None)
        assert not estimate.exceeds(0.0)


@pytest.mark.parametrize(
    ("shares", "low", "high"),
    [([0.0] * 12, 0.0, 0.2425), ([1.0] * 10, 0.7225, 1.0), ([1.0] * 5 + [0.0] * 5, 0.2366, 0.7634)],
)
def test_share_estimate_has_wilsons_interval(shares: list[float], low: float, high: float) -> None:
    estimate = share_estimate(shares)
    assert estimate.low == pytest.approx(low, abs=1e-4)
    assert estimate.high == pytest.approx(high, abs=1e-4)
