"""The slot recurrence for one token: the decode form."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_step(*, q: Tensor, k: Tensor, v: Tensor, write: Tensor, scale: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v [B,H,K]; write [B,H,M]; scale [H]; state [B,H,M,2K]. Returns out [B,H,K] and the new state.

    Equation (4) is a lerp: each slot moves the fraction `write` of the way to the new key and value.
    """
    pair = torch.cat((k, v), dim=-1)[:, :, None, :].to(state.dtype)
    state = torch.lerp(state, pair.expand_as(state), write[..., None])
    keys, values = torch.split(state, k.shape[-1], dim=-1)
    logits = (keys @ q[..., None]).squeeze(-1)
    read = torch.softmax(scale[None, :, None] * logits, dim=-1)
    return (read[:, :, None, :] @ values).squeeze(-2), state
