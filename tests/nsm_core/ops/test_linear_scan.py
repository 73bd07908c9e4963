"""The doubling scan against the loop that it stands for."""

from __future__ import annotations

import pytest
import torch

from nsm_core.ops.linear_scan import linear_scan


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64, 100])
def test_R8_the_scan_equals_a_loop_and_so_do_its_gradients(num_tokens: int) -> None:
    torch.manual_seed(0)
    decay = torch.rand(2, num_tokens, 5, dtype=torch.float64, requires_grad=True)
    update, initial = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, num_tokens, 5), (2, 5))
    )
    hidden, rows = initial, []
    for t in range(num_tokens):
        hidden = decay[:, t] * hidden + update[:, t]
        rows.append(hidden)
    want = torch.stack(rows, dim=1)
    got = linear_scan(decay, update, initial)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    tangent = torch.randn_like(want)
    inputs = (decay, update, initial)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, tangent), torch.autograd.grad(want, inputs, tangent), rtol=1e-10, atol=1e-12
    )
