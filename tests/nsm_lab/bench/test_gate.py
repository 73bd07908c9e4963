from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_lab.bench.gate import CPU_MEASURES, WALL_MEASURES, Verdict, bound_rank, decide, rounds_needed
from nsm_lab.bench.result import Measure

NAME = "decode.8.tokens_per_cpu_s"
LESS = "session.512.resumed_cpu_ms"
ROUNDS = 7
RATES = st.lists(st.floats(min_value=1.0, max_value=1e6), min_size=ROUNDS, max_size=12)


def verdict(base: list[float], new: list[float], *, name: str = NAME, tolerance: float = 0.05) -> Verdict:
    (found,) = decide(
        [Measure(name, tuple(base))], [Measure(name, tuple(new))], wanted=CPU_MEASURES, tolerance=tolerance
    )
    return found


@given(RATES)
def test_a_build_that_is_the_same_passes(rates: list[float]) -> None:
    assert not verdict(rates, rates).is_lost


@given(RATES, st.floats(min_value=1.0, max_value=10.0))
def test_a_build_that_is_better_passes(rates: list[float], factor: float) -> None:
    assert not verdict(rates, [rate * factor for rate in rates]).is_lost
    assert not verdict(rates, [rate / factor for rate in rates], name=LESS).is_lost


@given(RATES, st.floats(min_value=1.06, max_value=10.0))
def test_a_build_that_is_worse_in_every_round_is_refused_however_noisy_the_rounds(
    rates: list[float], factor: float
) -> None:
    assert verdict(rates, [rate / factor for rate in rates]).is_lost
    assert verdict(rates, [rate * factor for rate in rates], name=LESS).is_lost


@given(RATES, st.floats(min_value=1.0, max_value=1.04))
def test_a_loss_within_the_tolerance_passes(rates: list[float], factor: float) -> None:
    assert not verdict(rates, [rate / factor for rate in rates]).is_lost


@given(RATES, st.floats(min_value=1e-3, max_value=1e3))
def test_the_unit_decides_nothing(rates: list[float], scale: float) -> None:
    new = [rate / 1.2 for rate in rates]
    scaled = verdict([rate * scale for rate in rates], [rate * scale for rate in new])
    assert scaled.loss == pytest.approx(verdict(rates, new).loss)
    assert scaled.is_lost


@given(st.permutations(range(ROUNDS)))
def test_the_order_of_the_rounds_decides_nothing(order: list[int]) -> None:
    base, new = [100.0] * ROUNDS, [99.0, 80.0, 85.0, 110.0, 90.0, 91.0, 92.0]
    assert verdict(base, [new[index] for index in order]).bound == verdict(base, new).bound


def test_one_round_that_went_well_saves_a_build_that_may_be_as_good() -> None:
    """Seven rounds can be lost by chance once in 128: one that was won leaves a doubt, whatever the others were."""
    worse = [50.0] * (ROUNDS - 1)
    assert verdict([100.0] * ROUNDS, [*worse, 50.0]).is_lost
    assert not verdict([100.0] * ROUNDS, [*worse, 101.0]).is_lost


def test_one_disturbed_round_does_not_refuse() -> None:
    assert not verdict([100.0] * ROUNDS, [1.0, *[100.0] * (ROUNDS - 1)]).is_lost


def test_chance_alone_refuses_seldom() -> None:
    """Two equal builds on a noisy machine, four measures, 400 runs of the gate."""
    rng = random.Random(0)

    def noisy(name: str) -> Measure:
        return Measure(name, tuple(100.0 * rng.lognormvariate(0.0, 0.2) for _ in range(ROUNDS)))

    names = [f"decode.{size}.tokens_per_cpu_s" for size in (1, 8, 32, 64)]
    refused = sum(
        any(
            found.is_lost
            for found in decide(
                [noisy(name) for name in names], [noisy(name) for name in names], wanted=CPU_MEASURES, tolerance=0.05
            )
        )
        for _ in range(400)
    )
    assert refused <= 0.05 * 400


@given(st.integers(min_value=1, max_value=40), st.floats(min_value=1e-4, max_value=0.2))
def test_the_rank_is_the_highest_that_leaves_so_little_doubt(num_rounds: int, doubt: float) -> None:
    """By counting all ways in which rounds can fall to either side of the median, for few of them."""
    num_rounds = min(num_rounds, 10)
    ways = [sum(way) for way in itertools.product((0, 1), repeat=num_rounds)]

    def chance_below(rank: int) -> float:
        return sum(count < rank for count in ways) / len(ways)

    rank = bound_rank(num_rounds, doubt)
    assert chance_below(rank) <= doubt
    assert rank == num_rounds or chance_below(rank + 1) > doubt


@pytest.mark.parametrize("num_measures", [1, 4, 20])
def test_too_few_rounds_are_refused_and_told_how_many_it_takes(num_measures: int) -> None:
    needed = rounds_needed(num_measures)

    def measures(num_rounds: int) -> list[Measure]:
        return [Measure(f"decode.{size + 1}.tokens_per_cpu_s", (1.0,) * num_rounds) for size in range(num_measures)]

    decide(measures(needed), measures(needed), wanted=CPU_MEASURES, tolerance=0.05)
    with pytest.raises(ConfigError, match=f"at least {needed} can"):
        decide(measures(needed - 1), measures(needed - 1), wanted=CPU_MEASURES, tolerance=0.05)


def test_only_wanted_measures_are_looked_at_and_some_must_be_there() -> None:
    base = [Measure(NAME, (1.0,) * 5), Measure("decode.8.tokens_per_s", (1.0,) * 5)]
    for wanted, name in ((CPU_MEASURES, NAME), (WALL_MEASURES, "decode.8.tokens_per_s")):
        assert [found.name for found in decide(base, base, wanted=wanted, tolerance=0.05)] == [name]
    with pytest.raises(ConfigError, match="no measure in common"):
        decide(base, [], wanted=CPU_MEASURES, tolerance=0.05)


def test_builds_with_unequal_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 rounds of one build and 6 of the other"):
        verdict([1.0] * 5, [1.0] * 6)
