"""Finite numbers are told from others in every dtype of a file."""

from __future__ import annotations

import math

import pytest
import torch

from nsm_core.formats.number_kinds import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("at", [0, 500, 1031])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, at: int) -> None:
    values = torch.randn(1032, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert is_finite(values)
    for value in (math.nan, math.inf, -math.inf):
        changed = values.clone()
        changed[at] = value
        assert not is_finite(changed.reshape(8, 129))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_numbers_are_finite_and_so_is_nothing(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
