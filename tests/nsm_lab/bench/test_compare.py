from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_lab.bench.compare import compare, differences
from nsm_lab.bench.result import Measure
from tests.nsm_lab.bench.made_results import made_result

VALUES = st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=8).map(tuple)
NAME = "decode.8.tokens_per_s"


@given(VALUES, VALUES)
def test_turning_two_results_round_turns_the_ratio_round(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    first, second = made_result(Measure(NAME, one)), made_result(Measure(NAME, other))
    (there,), (back,) = compare(first, second), compare(second, first)
    assert there.ratio * back.ratio == pytest.approx(1.0)
    assert there.low == pytest.approx(1 / back.high)
    assert there.low <= there.ratio * (1 + 1e-9)
    assert there.ratio <= there.high * (1 + 1e-9)


@given(VALUES)
def test_a_result_beside_itself_is_as_good_and_never_clearly_else(values: tuple[float, ...]) -> None:
    result = made_result(Measure(NAME, values))
    (row,) = compare(result, result)
    assert row.ratio == 1.0
    assert not row.is_clear


def test_twice_as_fast_is_2_in_either_kind_of_unit() -> None:
    first = made_result(Measure(NAME, (10.0,)), Measure("decode.8.e2e_p50_ms", (10.0,)))
    second = made_result(Measure(NAME, (20.0,)), Measure("decode.8.e2e_p50_ms", (5.0,)))
    assert [(row.ratio, row.is_clear) for row in compare(first, second)] == [(2.0, True), (2.0, True)]


# of identical servers, run one after the other on two cores that others used too
DRIFTED = [
    ("stream.1.tokens_per_cpu_s", (711.1, 640.0, 711.1, 640.0), (581.8, 582.0, 533.3, 533.3)),
    ("stream.1.itl_p90_ms", (13.0, 13.1, 13.2, 13.1), (17.0, 17.1, 16.9, 17.2)),
    ("session.64.speedup", (2.0, 2.1, 2.0, 2.0), (1.6, 1.7, 1.6, 1.6)),
    ("memory.server.rss_mb", (530.0, 530.1, 530.2, 530.1), (531.0, 531.1, 531.2, 531.1)),
    # apart by far in the middle only: pieces come alone or in bursts
    ("stream.1.itl_p50_ms", (1.5, 1.4, 1.6, 0.02), (0.019, 0.019, 0.02, 1.5)),
]
# by more than two runs of one build
CHANGED = [
    ("stream.1.tokens_per_cpu_s", (700.0, 710.0), (520.0, 530.0)),
    ("stream.1.itl_p90_ms", (13.0, 13.1), (20.0, 20.1)),
    ("memory.server.rss_mb", (530.0, 530.1), (560.0, 561.0)),
    ("memory.process.ratio", (1.30, 1.31), (1.40, 1.41)),
]


@pytest.mark.parametrize(("name", "one", "other"), DRIFTED)
def test_drift_between_two_runs_is_no_verdict(name: str, one: tuple[float, ...], other: tuple[float, ...]) -> None:
    first, second = made_result(Measure(name, one)), made_result(Measure(name, other))
    assert not any(row.is_clear for row in compare(first, second) + compare(second, first))


@pytest.mark.parametrize(("name", "one", "other"), CHANGED)
def test_what_is_beyond_drift_and_spread_is_clear(name: str, one: tuple[float, ...], other: tuple[float, ...]) -> None:
    first, second = made_result(Measure(name, one)), made_result(Measure(name, other))
    assert all(row.is_clear for row in compare(first, second) + compare(second, first))


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measure in common"):
        compare(made_result(Measure(NAME, (1.0,))), made_result(Measure("decode.9.tokens_per_s", (1.0,))))


def test_what_else_differs_is_told() -> None:
    first = made_result()
    second = made_result(machine={**first.machine, "cpu": "another", "load": 9.0}, options={"repeats": 3})
    assert differences(first, second) == ["machine: cpu is one and another", "options: repeats is 2 and 3"]
    assert differences(first, first) == []
