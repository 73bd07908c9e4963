"""Causal linear attention in chunks of tokens, with one decay per head, for Mamba-2 and Performer.

    S[t] = exp(g[t]) * S[t-1] + k[t] v[t]^T        y[t] = q[t]^T S[t]

Inside a chunk the sum is a masked product of queries and keys; from chunk to chunk a state is carried (the "state-space
duality" of Dao and Gu 2024, arXiv 2405.21060, section 6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.chunks import exp_differences, in_chunks
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def linear_attention(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k [B,T,H or 1,F]; v [B,T,H,V]; log_decay g [B,T,H], at most 0; state [B,H,F,V].

    A token with k and g of zero leaves the state as it is. `reset` [B, T/CHUNK_LEN] bool: at this chunk the state is
    zero. Returns y [B,T,H,V] and the state after the last token.
    """
    num_tokens = q.shape[1]
    chunk = min(CHUNK_LEN, num_tokens)
    q, k, v = (in_chunks(x, chunk).transpose(2, 3) for x in (q, k, v))  # [B,n,H,C,F]
    total = in_chunks(log_decay, chunk).transpose(2, 3).cumsum(dim=-1)  # [B,n,H,C]
    inside = ((q @ k.transpose(-1, -2)) * exp_differences(total)) @ v
    late = (total[..., -1:] - total).exp()[..., None]
    update = (k * late).transpose(-1, -2) @ v
    before = chunk_states(update, total[..., -1], state, reset)
    outside = (q @ before[:, :-1]) * total.exp()[..., None]
    return (inside + outside).transpose(2, 3).flatten(1, 2)[:, :num_tokens], before[:, -1]


def chunk_states(update: Tensor, log_decay: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """The state at the start of every chunk, and after the last: [B, n + 1, H, F, V].

    update [B,n,H,F,V]: the sum that a chunk adds; log_decay [B,n,H]: logarithms of the factor that it leaves of earlier
    sums; state [B,H,F,V].
    """
    rows = torch.cat((state[:, None], update), dim=1).transpose(1, 2)  # [B,H,n+1,F,V]
    total = torch.cat((torch.zeros_like(log_decay[:, :1]), log_decay), dim=1).cumsum(dim=1)
    weights = exp_differences(total.transpose(1, 2))  # [B,H,n+1,n+1]
    if reset is not None:
        document = reset.long().cumsum(dim=1)
        of_state = torch.cat((document, document[:, -1:]), dim=1)
        of_row = torch.cat((torch.zeros_like(document[:, :1]), document), dim=1)
        weights = weights * (of_state[:, :, None] == of_row[:, None, :])[:, None]
    return torch.unflatten(weights @ rows.flatten(-2), -1, rows.shape[-2:]).transpose(1, 2)
