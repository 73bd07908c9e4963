"""The keyed recurrence token by token: the specification of the chunked form and of the kernels.

    R[t] = exp(g[t]) * S[t-1]        S[t] = R[t] + b[t] k[t] (v[t] - R[t]^T k[t])^T        y[t] = S[t]^T q[t]

S holds a row for each slot. For a unit key and b = 1 the slots then answer k[t] with exactly v[t]. This is the gated
delta rule (Yang et al. 2024, arXiv 2412.06464); with g = 0 the rule of DeltaNet (Schlag et al. 2021, arXiv 2102.11174).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def keyed_step(
    *, q: Tensor, k: Tensor, v: Tensor, strength: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token a row: q, k [B,H,M]; v [B,H,V]; strength, log_decay [B,H]; state [B,H,M,V].

    Returns what the token reads [B,H,V] and the new state.
    """
    state = log_decay.exp()[..., None, None] * state
    held = (k[..., None, :] @ state).squeeze(-2)
    state = state + k[..., None] * (strength[..., None] * (v - held))[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state


def keyed_scan_reference(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k [B,T,H,M], k of unit length; v [B,T,H,V]; strength in [0, 1] and log_decay <= 0 [B,T,H]; state [B,H,M,V].

    A token whose strength and log_decay are 0 leaves the state as it is. `reset` [B, T/CHUNK_LEN] bool: at this chunk
    the state is zero. Returns y [B,T,H,V] and the state after the last token.
    """
    read = []
    for t in range(q.shape[1]):
        if reset is not None and t % CHUNK_LEN == 0:
            state = torch.where(reset[:, t // CHUNK_LEN, None, None, None], 0.0, state)
        y, state = keyed_step(
            q=q[:, t], k=k[:, t], v=v[:, t], strength=strength[:, t], log_decay=log_decay[:, t], state=state
        )
        read.append(y)
    return torch.stack(read, dim=1), state
