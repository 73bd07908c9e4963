from __future__ import annotations

import pytest
import torch

from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.reference import slot_scan_reference
from nsm_core.ops.slot_scan.summary import slot_summary


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("resets", [None, [[0, 0, 0], [0, 0, 0]], [[0, 1, 0], [1, 0, 1]]])
def test_slot_summary_equals_the_tokens_one_by_one(has_keys: bool, resets: list[list[int]] | None) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    v, k, read_bias = draw(2, 192, 2, 8), draw(2, 192, 2, 8), draw(2, 192, 2, 5)
    log_decay = -draw(2, 192, 2, 5).abs().clamp(max=5.0) / 50
    state, initial = draw(2, 2, 5, 16 if has_keys else 8), draw(2, 5, 16 if has_keys else 8)
    reset = None if resets is None else torch.tensor(resets, dtype=torch.bool)
    keys = {"q": k, "k": k} if has_keys else {}
    _, want = slot_scan_reference(ScanInputs(
        v=v, log_decay=log_decay, scale=torch.ones(2), state=state, reset=reset, initial=initial, read_bias=read_bias,
        **keys,
    ))  # fmt: skip
    own_keys = {"k": k} if has_keys else {}
    decay, update = slot_summary(v=v, log_decay=log_decay, reset=reset, initial=initial, **own_keys)
    torch.testing.assert_close(decay[..., None] * state + update, want, rtol=1e-5, atol=1e-5)
