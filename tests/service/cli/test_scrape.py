from __future__ import annotations

import math

import pytest

from service.cli.scrape import Interval, Scrape, histogram_quantile

BEFORE = """\
# TYPE turns_total counter
turns_total{outcome="hit"} 10.0
turns_total{outcome="miss"} 3.0
# TYPE wait histogram
wait_bucket{le="0.1"} 5.0
wait_bucket{le="1.0"} 5.0
wait_bucket{le="+Inf"} 5.0
# TYPE slots gauge
slots 4.0
"""
AFTER = """\
# TYPE turns_total counter
turns_total{outcome="hit"} 18.0
turns_total{outcome="miss"} 2.0
turns_total{outcome="new"} 6.0
# TYPE wait histogram
wait_bucket{le="0.1"} 13.0
wait_bucket{le="1.0"} 15.0
wait_bucket{le="+Inf"} 15.0
# TYPE slots gauge
slots 5.0
"""


@pytest.fixture
def interval() -> Interval:
    return Interval(Scrape(BEFORE, at=100.0), Scrape(AFTER, at=102.0))


def test_counters_become_rates_and_one_that_fell_began_anew(interval: Interval) -> None:
    assert interval.rates("turns_total", "outcome") == {"hit": 4.0, "miss": 1.0, "new": 3.0}
    assert interval.rate("turns_total") == 8.0
    assert interval.ratio("turns_total", ["turns_total", "turns_total"]) == 0.5


def test_gauge_shows_its_latest_value(interval: Interval) -> None:
    assert interval.after.total("slots") == 5.0


def test_missing_metric_is_none_and_not_zero(interval: Interval) -> None:
    assert interval.after.total("nothing") is None
    assert interval.rate("nothing_total") is None
    assert interval.rates("nothing_total", "outcome") == {}
    assert interval.quantile(0.5, "nothing") is None
    assert interval.ratio("turns_total", ["nothing_total"]) is None
    none_yet = Interval(interval.after, interval.after)
    assert none_yet.quantile(0.5, "wait") is None
    assert none_yet.rate("turns_total") is None
    assert none_yet.rates("turns_total", "outcome") == {}


def test_quantiles_are_of_the_interval_alone(interval: Interval) -> None:
    """Ten observations, eight of them within a tenth: the ninth lies half-way through the next bucket."""
    assert interval.quantile(0.4, "wait") == pytest.approx(0.05)
    assert interval.quantile(0.9, "wait") == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ([(1.0, 0.0), (2.0, 4.0), (math.inf, 4.0)], 0.5, 1.5),
        ([(1.0, 4.0), (2.0, 4.0), (math.inf, 4.0)], 1.0, 1.0),
        ([(1.0, 1.0), (2.0, 1.0), (math.inf, 4.0)], 0.9, 2.0),  # beyond the last bound: that bound, as Prometheus says
        ([(1.0, 0.0), (math.inf, 0.0)], 0.5, None),
        ([], 0.5, None),
    ],
    ids=["within a bucket", "at its end", "beyond all", "no observations", "no buckets"],
)
def test_quantiles(buckets: list[tuple[float, float]], q: float, expected: float | None) -> None:
    assert histogram_quantile(q, buckets) == expected


def test_text_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="metric name"):
        Scrape("<html>what is this</html>", at=0.0)
