"""The generalised delta rule of RWKV-7 (Peng et al. 2025, arXiv 2503.14456) in chunks of tokens.

    S[t] = diag(w[t]) S[t-1] + b[t] (a[t]^T S[t-1]) + k[t] v[t]^T        y[t] = r[t]^T S[t]

Within a chunk the values u[t] = a[t]^T S[t-1] follow from each other: a triangular system. Solved once, a chunk is a
matrix that acts on the state and a matrix that is added to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.chunks import in_chunks

# RWKV-7 keeps at least exp(-exp(-0.5)) = 0.545 of a channel at a token. Against the middle of 32 tokens no factor
# passes e^10, which leaves a sum of fp32 numbers its digits.
DELTA_CHUNK_LEN = 32


def delta_rule(
    *, r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """r, log_w, k, a, b [B,T,H,K]; v [B,T,H,V]; state [B,H,K,V].

    A token with log_w, k and b of zero leaves the state as it is. `reset` [B, T/64] bool: at this chunk the state is
    zero. Returns y [B,T,H,V] and the state after the last token.
    """
    num_tokens = r.shape[1]
    chunk = min(DELTA_CHUNK_LEN, num_tokens)
    r, log_w, k, v, a, b = (in_chunks(x, chunk).transpose(2, 3) for x in (r, log_w, k, v, a, b))  # [B,n,H,C,K]
    total = log_w.cumsum(dim=-2)
    middle, end = total[..., chunk // 2, None, :], total[..., -1:, :]
    decayed, growth = (total - log_w).exp(), (middle - total).exp()  # before a token; from it to the middle
    a_near, r_near = a * (total - log_w - middle).exp(), r * (total - middle).exp()
    b_near, k_near = b * growth, k * growth
    among = (a_near @ b_near.transpose(-1, -2)).tril(-1)
    known = torch.cat((a * decayed, (a_near @ k_near.transpose(-1, -2)).tril(-1) @ v), dim=-1)
    identity = torch.eye(chunk, dtype=r.dtype, device=r.device)
    solved = torch.linalg.solve_triangular(identity - among, known, upper=False, unitriangular=True)
    of_state, own = solved.split((r.shape[-1], v.shape[-1]), dim=-1)  # u = of_state @ S + own
    late = (end - total).exp()
    b_late, k_late = (b * late).transpose(-1, -2), (k * late).transpose(-1, -2)
    transition = torch.diag_embed(end.squeeze(-2).exp()) + b_late @ of_state
    before, last = _walk(transition, b_late @ own + k_late @ v, state, reset, 64 // chunk)
    u = of_state @ before + own
    y = (r * total.exp()) @ before
    y = y + (r_near @ b_near.transpose(-1, -2)).tril() @ u + (r_near @ k_near.transpose(-1, -2)).tril() @ v
    return y.transpose(2, 3).flatten(1, 2)[:, :num_tokens], last


def _walk(
    transition: Tensor, update: Tensor, state: Tensor, reset: Tensor | None, chunks_per_flag: int
) -> tuple[Tensor, Tensor]:
    """Chunk after chunk, S <- transition @ S + update: the states before each [B,n,H,K,V], and after the last."""
    before = []
    for index in range(transition.shape[1]):
        if reset is not None and index % chunks_per_flag == 0:
            starts = reset[:, index // chunks_per_flag, None, None, None]
            state = torch.where(starts, 0.0, state)
        before.append(state)
        state = transition[:, index] @ state + update[:, index]
    return torch.stack(before, dim=1), state
