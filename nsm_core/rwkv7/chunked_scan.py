"""The recurrence of RWKV-7 over chunks of tokens, for training: a triangular system a chunk, a loop over chunks.

With W[t] the product of the decays since the chunk's start and S[t] = diag(W[t]) Z[t], a chunk that starts at Z[0]
removes u[t] = q[t]^T Z[t-1] and becomes

    Z[t] = Z[0] + sum_{i<=t} (k[i] / W[i]) v[i]^T - (p[i] / W[i]) u[i]^T,    q[t] = removed[t] W[t-1]

so that u follows from (I + tril(q p^T / W, -1)) u = q Z[0] + tril(q k^T / W, -1) v. (The WY form of Yang et al. 2024,
arXiv 2406.06484, with a decay for each row.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.chunks import in_chunks

# A channel keeps at least 0.545 of itself at a token: 1 / W stays below 2e4, which fp32 bears
CHUNK_LEN = 16


def state_scan_chunked(
    *, r: Tensor, w: Tensor, k: Tensor, v: Tensor, removed: Tensor, rate: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Same arguments and result as `state_scan`, within rounding."""
    num_tokens = r.shape[1]
    chunk = min(CHUNK_LEN, num_tokens)
    missing = -num_tokens % chunk  # padding keeps the state: its w is 1
    w = torch.cat((w, w.new_ones(w.shape[0], missing, *w.shape[2:])), dim=1)
    r, w, k, v, removed, rate = (in_chunks(x, chunk).transpose(2, 3) for x in (r, w, k, v, removed, rate))
    decay = w.cumprod(dim=-2)
    before = torch.cat((torch.ones_like(decay[..., :1, :]), decay[..., :-1, :]), dim=-2)
    asked, taken, added, read = removed * before, removed * rate / decay, k / decay, r * decay
    identity = torch.eye(chunk, dtype=r.dtype, device=r.device)
    among = (asked @ taken.transpose(-1, -2)).tril(-1)
    given = torch.cat(((asked @ added.transpose(-1, -2)).tril(-1) @ v, asked), dim=-1)
    solved = torch.linalg.solve_triangular(identity + among, given, upper=False, unitriangular=True)
    own, of_state = solved.split((v.shape[-1], asked.shape[-1]), dim=-1)  # u = own + of_state @ Z[0]
    of_added = (read @ added.transpose(-1, -2)).tril() @ v
    of_taken = (read @ taken.transpose(-1, -2)).tril()
    state, outputs = initial, []
    for n in range(r.shape[1]):
        gone = own[:, n] + of_state[:, n] @ state
        outputs.append(read[:, n] @ state + of_added[:, n] - of_taken[:, n] @ gone)
        state = state + added[:, n].transpose(-1, -2) @ v[:, n] - taken[:, n].transpose(-1, -2) @ gone
        state = decay[:, n, :, -1, :, None] * state
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :num_tokens], state
