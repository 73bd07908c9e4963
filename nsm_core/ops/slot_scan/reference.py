"""The slot recurrence, token by token: the specification of every faster form.

Equations (3)-(5) of the PULSE linear gate (docs/model.md): convex writes into a bank of keys and a bank of values that
share one write weight per slot and token, then a softmax read over the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slot_scan_reference(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    write: Tensor,
    scale: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
    initial: Tensor | None = None,
    chunk_len: int = 64,
) -> tuple[Tensor, Tensor]:
    """q, k, v [B,T,H,K]; log_decay, write [B,T,H,M]; scale [H]; state [B,H,M,2K] (keys beside values).

    `reset` [B, T/chunk_len] bool: before the first token of such a chunk the state becomes `initial` [H,M,2K].
    Returns out [B,T,H,K] and the state after the last token, both in the state's dtype.
    """
    outputs = []
    head_dim = k.shape[-1]
    for t in range(q.shape[1]):
        if reset is not None and initial is not None and t % chunk_len == 0:
            starts_here = reset[:, t // chunk_len, None, None, None]
            state = torch.where(starts_here, initial, state)
        pair = torch.cat((k[:, t], v[:, t]), dim=-1).to(state.dtype)
        keep = log_decay[:, t].exp()[..., None]
        state = keep * state + write[:, t][..., None] * pair[:, :, None, :]
        keys, values = torch.split(state, head_dim, dim=-1)
        logits = torch.einsum("bhk,bhmk->bhm", q[:, t].to(state.dtype), keys)
        read = torch.softmax(scale[None, :, None] * logits, dim=-1)
        outputs.append(torch.einsum("bhm,bhmk->bhk", read, values))
    return torch.stack(outputs, dim=1), state
