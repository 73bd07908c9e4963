"""The chunked form beside its equation, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsm_lab.baselines.linear_attention import linear_attention


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, starts: list[int]
) -> tuple[Tensor, Tensor]:
    read = []
    for t in range(q.shape[1]):
        if t in starts:
            state = torch.zeros_like(state)
        added = k[:, t, :, :, None] * v[:, t, :, None, :]
        state = log_decay[:, t, :, None, None].exp() * state + added
        read.append(torch.einsum("bhf,bhfv->bhv", q[:, t].expand(-1, state.shape[1], -1), state))
    return torch.stack(read, dim=1), state


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "keys of all heads"])
def test_chunks_equal_the_recurrence(num_tokens: int, shared: bool) -> None:
    heads = 1 if shared else 3
    q, k = (random(2, num_tokens, heads, 5, seed=seed) for seed in (1, 2))
    v, state = random(2, num_tokens, 3, 4, seed=3), random(2, 3, 5, 4, seed=4)
    log_decay = -random(2, num_tokens, 3, seed=5).abs() * 3.0
    got = linear_attention(q=q, k=k, v=v, log_decay=log_decay, state=state)
    torch.testing.assert_close(got, token_by_token(q, k, v, log_decay, state, []), rtol=1e-10, atol=1e-10)


def test_a_text_that_starts_within_the_call_sees_nothing_before() -> None:
    q, k, v = (random(1, 256, 2, 4, seed=seed) for seed in (1, 2, 3))
    state, log_decay = random(1, 2, 4, 4, seed=4), -random(1, 256, 2, seed=5).abs()
    reset = torch.tensor([[False, True, False, True]])
    got = linear_attention(q=q, k=k, v=v, log_decay=log_decay, state=state, reset=reset)
    torch.testing.assert_close(got, token_by_token(q, k, v, log_decay, state, [64, 192]), rtol=1e-10, atol=1e-10)


def test_strong_decays_overflow_nowhere() -> None:
    """A token that forgets all but exp(-200) leaves finite numbers and gradients."""
    q, k, v = (random(1, 64, 1, 4, seed=seed).float().requires_grad_() for seed in (1, 2, 3))
    log_decay = torch.full((1, 64, 1), -200.0, requires_grad=True)
    y, _ = linear_attention(q=q, k=k, v=v, log_decay=log_decay, state=torch.ones(1, 1, 4, 4))
    y.sum().backward()
    assert y.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, log_decay))
