"""Tokens drawn by the native kernels are those that the sampler draws in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.library import variants
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import SampledToken
from nsm_core.sampling.sampler import Sampler, SamplingRow
from tests.support.counts import scaled

pytestmark = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"temperature": 1.7, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 7, "top_p": 0.5, "temperature": 0.8},
    {"min_p": 0.05},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 1e-9},
]


def make_row(position: int, **fields: Any) -> SamplingRow:
    return SamplingRow(params=SamplingParams(**fields), position=position, generated_counts={})


def ids_of(sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    sampled = sampler.sample(logits, rows)
    assert all(isinstance(token, SampledToken) for token in sampled)
    return [token.token_id for token in sampled if isinstance(token, SampledToken)]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 64, 1000])
def test_the_same_tokens_as_in_numpy(params: dict[str, Any], vocab_size: int) -> None:
    num_rows = scaled(60, 1000)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    rows = [make_row(position * 97, seed=position % 5, **params) for position in range(num_rows)]
    assert ids_of(Sampler(draw_tokens), logits, rows) == ids_of(Sampler(), logits, rows)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_equal_weights_prefer_the_lowest_ids(params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 1.0, 2.0, -50.0] * 20]).repeat(40, 1)
    rows = [make_row(position, seed=1, **params) for position in range(40)]
    assert ids_of(Sampler(draw_tokens), logits, rows) == ids_of(Sampler(), logits, rows)


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 2**32), position=st.integers(0, 2**63 - 1))
def test_M5_draw_is_the_uniform_number_of_its_position(seed: int, choice: int, position: int) -> None:
    """With many equal logits the id tells the number to a few bits."""
    row = make_row(position, seed=seed, choice_index=choice)
    logits = torch.zeros(1, 4096)
    assert ids_of(Sampler(draw_tokens), logits, [row]) == ids_of(Sampler(), logits, [row])


def test_rows_between_greedy_ones_are_drawn_from_their_own_logits() -> None:
    logits = torch.full((3, 50), -30.0)
    logits[torch.arange(3), torch.tensor([4, 9, 14])] = 30.0
    rows = [make_row(0, temperature=0.0), make_row(1), make_row(2)]
    assert ids_of(Sampler(draw_tokens), logits, rows) == [4, 9, 14]


def test_the_logits_stay_as_they_were() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    before = logits.copy()
    draw_tokens(logits, [1], [make_row(0, top_k=3)])
    assert np.array_equal(logits, before)
