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
