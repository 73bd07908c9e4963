"""Which slots a token writes to and how strongly, in plain PyTorch: the specification of the kernel.

Equations (2) and (3) of the PULSE linear gate (docs/model.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN


def write_distribution(*, logits: Tensor, selection_bias: Tensor, top_k: int, taper: float) -> Tensor:
    """logits [..., H, M] -> write distribution [..., H, M]: at most top_k non-zeros, summing to 1.

    The marginal slot's weight is zero at a tie: selection is continuous in the logits. Value only, no gradient.
    """
    if top_k == logits.shape[-1]:
        return torch.softmax(logits, dim=-1)
    scores = (logits + selection_bias).detach()
    threshold = scores.topk(top_k + 1, dim=-1).values[..., -1:]
    fade = -torch.expm1(-(scores - threshold).clamp(min=0.0) / taper)
    weights = (logits - logits.detach().amax(dim=-1, keepdim=True)).exp() * fade
    return weights / weights.sum(dim=-1, keepdim=True)


def routing_reference(
    *,
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    top_k: int,
    taper: float,
    valid: Tensor | None = None,
) -> Tensor:
    """logits [..., H, M]; strength [..., H] before its softplus; selection_bias, log_timescale [H, M].

    `valid` [...] bool: tokens that may write at all; None: all. Returns the log decay [..., H, M] in
    [LOG_DECAY_MIN, 0]; 0 for slots that were not selected.
    """
    routing = write_distribution(logits=logits, selection_bias=selection_bias, top_k=top_k, taper=taper)
    strength = F.softplus(strength)[..., None]
    log_decay = (-log_timescale.exp() * strength * routing).clamp(min=LOG_DECAY_MIN)
    return log_decay if valid is None else torch.where(valid[..., None, None], log_decay, 0.0)
