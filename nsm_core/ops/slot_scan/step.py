"""The slot recurrence for one token: the decode form."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_step(
    *,
    v: Tensor,
    write: Tensor,
    scale: Tensor,
    state: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    read_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k, v [B,H,K]; write [B,H,M]; scale [H]; state [B,H,M,2K]. Returns out [B,H,K] and the new state.

    `read_bias` [B,H,M] is added to the read logits; without q and k it is the read logits and state is [B,H,M,K].
    Equation (4) is a lerp: each slot moves the fraction `write` of the way to the new key and value.
    """
    out, state, _ = slot_step_with_reads(q=q, k=k, v=v, write=write, scale=scale, state=state, read_bias=read_bias)
    return out, state


def slot_step_with_reads(
    *,
    v: Tensor,
    write: Tensor,
    scale: Tensor,
    state: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    read_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`slot_step`, and the token's read weights, [B,H,M]."""
    pair = (v if k is None else torch.cat((k, v), dim=-1))[:, :, None, :].to(state.dtype)
    state = torch.lerp(state, pair.expand_as(state), write[..., None])
    *keys, values = torch.split(state, v.shape[-1], dim=-1)
    terms = [] if read_bias is None else [read_bias.to(state.dtype)]
    if q is not None:
        terms.append(scale[None, :, None] * (keys[0] @ q[..., None]).squeeze(-1))
    read = torch.softmax(terms[0] if len(terms) == 1 else terms[0] + terms[1], dim=-1)
    return (read[:, :, None, :] @ values).squeeze(-2), state, read
