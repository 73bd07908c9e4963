"""Matrices in int4: the grid's promises, the error of rounding, and products by the kernels, number for number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from nsm_core.formats.int4_groups import GROUP, LIMIT, MAX_STEP, MOST, Int4Rows, PackedInt4, is_packable, quantize_int4


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


@pytest.mark.parametrize("num_cols", [2, 32, 50, 96])
def test_two_numbers_share_a_byte_in_a_file(num_cols: int) -> None:
    torch.manual_seed(num_cols)
    rows = quantize_int4(torch.randn(5, num_cols))
    packed = rows.packed()
    assert packed.numbers.shape == (5, num_cols // 2)
    assert packed.fault() is None
    for field in dataclasses.fields(rows):
        assert getattr(packed.rows(), field.name).equal(getattr(rows, field.name))
    assert packed.dense().equal(rows.dense())


def test_rows_that_do_not_fill_their_bytes_are_not_packed() -> None:
    assert not is_packable((4, 3))
    assert not is_packable((4, 2, 2))
    with pytest.raises(ValueError, match="rows of 3 numbers do not fill their bytes"):
        quantize_int4(torch.randn(4, 3)).packed()


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("steps", torch.zeros(2, 2, dtype=torch.uint8), "a grid beyond int8"),
        ("steps", torch.full((2, 2), 17, dtype=torch.uint8), "a grid beyond int8"),
        ("offsets", torch.full((2, 2), 127, dtype=torch.int8), "a grid beyond int8"),
        ("offsets", torch.full((2, 2), -128, dtype=torch.int8), "a grid beyond int8"),
        ("offsets", torch.zeros(2, 1, dtype=torch.int8), "other shapes"),
        ("scale", torch.zeros(3), "other shapes"),
        ("numbers", torch.zeros(2, dtype=torch.uint8), "other shapes"),
        ("numbers", torch.zeros(2, 20), "other dtypes"),
    ],
)
def test_grids_that_no_kernel_can_compute_with_are_faults(field: str, value: Tensor, fault: str) -> None:
    packed: PackedInt4 = quantize_int4(torch.randn(2, 40)).packed()
    assert fault in str(dataclasses.replace(packed, **{field: value}).fault())
