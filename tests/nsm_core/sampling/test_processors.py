"""Each step against its plain definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.sampling.counts import TokenCounts
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.processors import (
    adjust,
    apply_filters,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    needs_adjustment,
    to_weights,
)

Row = npt.NDArray[np.float32]

# Multiples of 1/64: sums are exact, so the definition and the fast way cannot round apart
weight_rows = st.lists(st.integers(0, 64), min_size=1, max_size=60).map(
    lambda numerators: np.array([*numerators, 64], dtype=np.float32) / 64
)


def row(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def by_likelihood(weights: Row) -> list[int]:
    return sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))


def only(weights: Row, ids: list[int]) -> list[float]:
    return [float(weight) if token_id in ids else 0.0 for token_id, weight in enumerate(weights)]


@given(weight_rows, st.integers(0, 70))
def test_top_k_selects_the_most_likely_and_the_lowest_ids_among_equals(weights: Row, top_k: int) -> None:
    remaining = by_likelihood(weights)[: top_k or None]
    got = weights.copy()
    keep_top_k(got, top_k)
    assert got.tolist() == only(weights, remaining)


@given(weight_rows, st.integers(1, 64).map(lambda numerator: numerator / 64))
def test_top_p_selects_the_fewest_most_likely_with_that_mass(weights: Row, top_p: float) -> None:
    remaining: list[int] = []
    for token_id in by_likelihood(weights):
        if sum(float(weights[i]) for i in remaining) < top_p * float(weights.sum(dtype=np.float64)):
            remaining.append(token_id)
    got = weights.copy()
    keep_top_p(got, top_p)
    assert got.tolist() == only(weights, remaining)


@given(weight_rows, st.integers(0, 64).map(lambda numerator: numerator / 64))
def test_min_p_selects_tokens_relative_to_the_most_likely(weights: Row, min_p: float) -> None:
    got = weights.copy()
    keep_min_p(got, min_p)
    assert got.tolist() == [weight if weight >= min_p else 0.0 for weight in weights.tolist()]


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_filters_on_a_real_sized_row(scale: float) -> None:
    logits = np.random.default_rng(1).standard_normal((1, 8191)).astype(np.float32) * np.float32(scale)
    to_weights(logits, np.ones(1, dtype=np.float32))
    weights = logits[0]
    order = by_likelihood(weights)
    for top_k in (1, 2, 50, 4000, 8190):
        got = weights.copy()
        keep_top_k(got, top_k)
        assert set(np.flatnonzero(got)) == {i for i in order[:top_k] if weights[i] > 0}
    mass = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    for top_p in (0.01, 0.5, 0.9, 0.999):
        got = weights.copy()
        keep_top_p(got, top_p)
        assert set(np.flatnonzero(got)) == set(order[: int(np.searchsorted(mass, top_p)) + 1])


def test_top_p_applies_after_top_k() -> None:
    weights = row(1.0, 0.5, 0.25, 0.25)
    apply_filters(weights, SamplingParams(top_k=2, top_p=0.7))  # of 1.5, not of 2.0: 1 / 1.5 < 0.7
    assert weights.tolist() == [1.0, 0.5, 0.0, 0.0]
    apply_filters(weights, SamplingParams(top_k=2, top_p=0.6, min_p=0.2))
    assert weights.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_filters_leave_at_least_one_token() -> None:
    weights = row(0.5, 1.0, 1.0)
    apply_filters(weights, SamplingParams(top_k=1, top_p=1e-12, min_p=1.0))
    assert weights.tolist() == [0.0, 1.0, 0.0]


def test_top_p_just_below_one_may_keep_everything() -> None:
    weights = np.full(1000, 1.0, dtype=np.float32)
    keep_top_p(weights, 1.0 - 2**-53)
    assert weights.tolist() == [1.0] * 1000


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 0.5, 2.0])
def test_any_temperature_gives_finite_weights_with_the_best_at_one(temperature: float) -> None:
    logits = np.array([[3.0, 5.0, 5.0, -1000.0], [-3e38, 3e38, 0.0, 1.0]], dtype=np.float32)
    to_weights(logits, np.array([temperature, temperature], dtype=np.float32))
    assert np.isfinite(logits).all()
    assert logits[0, 1] == logits[0, 2] == logits[1, 1] == 1.0
    assert logits[0, 0] == pytest.approx(np.exp(-2.0 / max(temperature, 1e-30)), rel=1e-6)


def test_bias_comes_first_and_penalties_follow_the_counts() -> None:
    logits = row(2.0, -2.0, 1.0, 4.0)
    params = SamplingParams(
        logit_bias={2: 3.0, 3: -6.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    adjust(logits, params, {0: 1, 1: 2, 3: 4})
    assert logits.tolist() == [
        2.0 / 2 - 0.5 - 0.25,
        -2.0 * 2 - 0.5 - 0.5,
        1.0 + 3.0,  # never sampled: bias only
        (4.0 - 6.0) * 2 - 0.5 - 1.0,  # negative after the bias, so multiplied
    ]


def test_both_kinds_of_counts_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    counts = {int(token_id): int(rng.integers(1, 9)) for token_id in rng.permutation(500)[:200]}
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.1)
    first = rng.standard_normal(500).astype(np.float32)
    second = first.copy()
    adjust(first, params, counts)
    adjust(second, params, TokenCounts(500, counts))
    assert first.tobytes() == second.tobytes()


def test_a_count_of_zero_is_no_count() -> None:
    logits = row(1.0, 2.0)
    adjust(logits, SamplingParams(presence_penalty=1.0, repetition_penalty=3.0), {0: 0})
    assert logits.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("repetition_penalty", [1e-300, 5e-324])
def test_extreme_penalties_stay_finite(repetition_penalty: float) -> None:
    logits = row(30.0, -30.0, 0.0)
    adjust(
        logits, SamplingParams(repetition_penalty=repetition_penalty, frequency_penalty=-2.0), {0: 10**15, 1: 1, 2: 1}
    )
    assert np.isfinite(logits).all()
    assert logits.argmax() == 0


def test_adjustment_is_needed_only_where_it_changes_something() -> None:
    assert not needs_adjustment(SamplingParams(), {1: 1})
    assert not needs_adjustment(SamplingParams(presence_penalty=1.0), {})
    assert needs_adjustment(SamplingParams(presence_penalty=1.0), {1: 1})
    assert needs_adjustment(SamplingParams(logit_bias={1: 1.0}), {})
