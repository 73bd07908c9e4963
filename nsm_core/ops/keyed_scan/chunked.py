"""The keyed recurrence over chunks of tokens: matmuls, one triangular system a chunk, a loop over chunks.

Within a chunk the corrections u[t] = b[t] (v[t] - R[t]^T k[t]) follow from each other by

    u[i] + b[i] sum_{j<i} exp(G[i] - G[j]) (k[i] . k[j]) u[j] = b[i] (v[i] - exp(G[i]) S^T k[i])

with G the running sum of g and S the state before the chunk: (I + A) u = right-hand side. (The WY form of Yang et al.
2024, arXiv 2406.06484.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.chunks import exp_differences, in_chunks
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def keyed_scan_chunked(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    log_decay: Tensor,
    state: Tensor,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and result as `keyed_scan_reference`; computed in the dtype of `state`."""
    num_tokens, dtype = q.shape[1], state.dtype
    chunk = min(CHUNK_LEN, num_tokens)
    q, k, v = (in_chunks(x.to(dtype), chunk).transpose(2, 3) for x in (q, k, v))  # [B,n,H,C,.]
    strength, log_decay = (in_chunks(x.to(dtype), chunk).transpose(2, 3)[..., None] for x in (strength, log_decay))
    total = log_decay.squeeze(-1).cumsum(dim=-1)  # [B,n,H,C]
    decay = exp_differences(total)
    among = (strength * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    from_start = total.exp()[..., None]
    given = torch.cat((strength * v, strength * from_start * k), dim=-1)
    identity = torch.eye(chunk, dtype=dtype, device=q.device)
    solved = torch.linalg.solve_triangular(identity + among, given, upper=False, unitriangular=True)
    own, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)  # u = own - of_state @ S
    inside = (q @ k.transpose(-1, -2)) * decay
    late = k * (total[..., -1:] - total).exp()[..., None]
    read = []
    for n in range(q.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], 0.0, state)
        corrections = own[:, n] - of_state[:, n] @ state
        read.append((q[:, n] * from_start[:, n]) @ state + inside[:, n] @ corrections)
        state = from_start[:, n, :, -1:] * state + late[:, n].transpose(-1, -2) @ corrections
    return torch.stack(read, dim=1).transpose(2, 3).flatten(1, 2)[:, :num_tokens], state
