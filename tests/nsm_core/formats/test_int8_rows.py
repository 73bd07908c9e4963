from __future__ import annotations

import pytest
import torch

from nsm_core.formats import int8_rows


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 16), (9, 16, 3)])
def test_rows_in_chunks_equal_rows_at_once(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    whole = int8_rows.quantize_rows(weight)
    monkeypatch.setattr(int8_rows, "CHUNK_ROWS", 4)
    parts = int8_rows.quantize_rows(weight)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    assert bool(((whole[0] * whole[1][:, None] - weight).abs() <= 0.501 * whole[1][:, None]).all())


def test_stored_rows_are_those_that_rounding_their_weights_gives() -> None:
    torch.manual_seed(5)
    weight = torch.randn(9, 20) * torch.logspace(-6, 4, 9)[:, None]
    numbers, scale = int8_rows.quantize_rows(weight)
    zeros = int8_rows.Int8Rows(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2))
    odd = int8_rows.Int8Rows(torch.tensor([[-128, 5], [3, 1]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
    for rows in (int8_rows.Int8Rows(numbers, scale), zeros, odd):
        for got, want in zip(rows.quantized(), int8_rows.quantize_rows(rows.dense()), strict=True):
            assert got.equal(want)
    assert int8_rows.Int8Rows(numbers, scale).quantized()[0] is numbers  # nothing is rounded again
