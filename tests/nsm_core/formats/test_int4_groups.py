"""Matrices in int4: the grid's promises, the error of rounding, and products by the kernels, number for number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsm_core.formats.int4_groups import GROUP, LIMIT, MAX_STEP, MOST, Int4Rows, quantize_int4


def random_matrix(num_rows: int, num_cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_cols, generator=generator)
    rows *= torch.rand(num_rows, 1, generator=generator) + 0.01
    rows[::7, 3] *= 20.0  # outliers, which spread the grid of their group
    return rows


def error_of(rows: Int4Rows, weight: Tensor) -> float:
    return float((rows.dense() - weight).square().mean().sqrt() / weight.square().mean().sqrt())


@pytest.mark.parametrize("num_cols", [16, 32, 48, 160])
def test_every_number_lies_on_a_grid_within_int8(num_cols: int) -> None:
    rows = quantize_int4(random_matrix(37, num_cols))
    assert rows.numbers.shape == (37, num_cols)
    assert rows.steps.shape == rows.offsets.shape == (37, -(-num_cols // GROUP))
    assert int(rows.numbers.max()) <= MOST
    assert 1 <= int(rows.steps.min()) <= int(rows.steps.max()) <= MAX_STEP
    low, high = rows.offsets.int(), rows.offsets.int() + MOST * rows.steps.int()
    assert int(low.min()) >= -LIMIT
    assert int(high.max()) <= LIMIT
    spread = [part.int().repeat_interleave(GROUP, dim=1)[:, :num_cols] for part in (rows.steps, rows.offsets)]
    want = (rows.numbers.int() * spread[0] + spread[1]) * rows.scale[:, None]
    torch.testing.assert_close(rows.dense(), want.float())


def test_normal_weights_lose_eight_percent() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    assert error_of(quantize_int4(weight), weight) < 0.08


def test_weights_on_a_grid_of_sixteen_steps_lose_nothing() -> None:
    numbers = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(2))
    numbers[:, ::GROUP], numbers[:, 1::GROUP] = 0, MOST
    weight = (numbers * 16.0 - 120.0) / 120  # -1 to 1 in sixteen steps
    torch.testing.assert_close(quantize_int4(weight).dense(), weight)


def test_rows_of_zero_stay_zero() -> None:
    assert quantize_int4(torch.zeros(3, 48)).dense().abs().max() < 1e-9
