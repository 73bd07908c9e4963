from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from service.bench.compare import compare, differences
from service.bench.result import Measure
from tests.service.bench.made_results import made_result

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


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measure in common"):
        compare(made_result(Measure(NAME, (1.0,))), made_result(Measure("decode.9.tokens_per_s", (1.0,))))


def test_what_else_differs_is_told() -> None:
    first = made_result()
    second = made_result(machine={**first.machine, "cpu": "another", "load": 9.0}, options={"repeats": 3})
    assert differences(first, second) == ["machine: cpu is one and another", "options: repeats is 2 and 3"]
    assert differences(first, first) == []
