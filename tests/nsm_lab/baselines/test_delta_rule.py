"""The chunked delta rule beside its equation, token by token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_lab.baselines.delta_rule import delta_rule


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """As RWKV-7 makes them: normed removal keys, rates in (0, 1), decays in (0.545, 1)."""
    generator = torch.Generator().manual_seed(7)

    def random() -> Tensor:
        return torch.randn(2, num_tokens, 3, 8, generator=generator, dtype=torch.float64).to(dtype)

    kappa = F.normalize(random(), dim=-1)
    return {
        "r": random(),
        "log_w": -math.exp(-0.5) * torch.sigmoid(random()),
        "k": random(),
        "v": random(),
        "a": -kappa,
        "b": kappa * torch.sigmoid(random()),
        "state": torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype),
    }


def token_by_token(starts: list[int], *, state: Tensor, **tokens: Tensor) -> tuple[Tensor, Tensor]:
    read = []
    for t in range(tokens["r"].shape[1]):
        if t in starts:
            state = torch.zeros_like(state)
        r, log_w, k, v, a, b = (tokens[name][:, t] for name in ("r", "log_w", "k", "v", "a", "b"))
        removed = torch.einsum("bhk,bhkv->bhv", a, state)
        state = log_w.exp()[..., None] * state + b[..., None] * removed[..., None, :] + k[..., None] * v[..., None, :]
        read.append(torch.einsum("bhk,bhkv->bhv", r, state))
    return torch.stack(read, dim=1), state


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_chunks_equal_the_recurrence(num_tokens: int) -> None:
    given = inputs(num_tokens)
    torch.testing.assert_close(delta_rule(**given), token_by_token([], **given), rtol=1e-10, atol=1e-10)


def test_a_text_that_starts_within_the_call_sees_nothing_before() -> None:
    given = inputs(192)
    got = delta_rule(**given, reset=torch.tensor([[False, True, False], [True, False, True]]))
    for row, starts in enumerate(([64], [0, 128])):
        own = {name: value[row : row + 1] for name, value in given.items()}
        want = token_by_token(starts, **own)
        torch.testing.assert_close((got[0][row : row + 1], got[1][row : row + 1]), want, rtol=1e-10, atol=1e-10)


def test_fp32_keeps_its_digits_at_the_fastest_decay() -> None:
    given = inputs(64, torch.float32) | {"log_w": torch.full((2, 64, 3, 8), -math.exp(-0.5))}
    exact = {name: value.double() for name, value in given.items()}
    got, want = delta_rule(**given), delta_rule(**exact)
    torch.testing.assert_close([x.double() for x in got], list(want), rtol=2e-4, atol=2e-4)
