"""What a row of tokens does to the slots, all tokens together: one affine map, without a read."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def slot_summary(
    *, v: Tensor, log_decay: Tensor, k: Tensor | None = None, reset: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(decay [B,H,M], update [B,H,M,2K]): the slots after the row are `decay * slots + update`; in log_decay's dtype.

    Arguments as of `slot_scan_reference`. Every exponent is a sum of log decays up to the row's end: none is above 0.
    """
    with torch.autocast(v.device.type, enabled=False):
        is_reset = None
        if reset is not None and initial is not None:
            live, is_reset = _after_last_reset(reset)
            log_decay = torch.where(live[..., None, None], log_decay, 0.0)
        cumulative = log_decay.cumsum(dim=1)
        total = cumulative[:, -1]  # [B,H,M]
        to_end = -torch.expm1(log_decay) * (total[:, None] - cumulative).exp()
        pairs = v if k is None else torch.cat((k, v), dim=-1)
        decay, update = total.exp(), torch.einsum("bthm,bthk->bhmk", to_end, pairs.to(log_decay.dtype))
        if is_reset is not None and initial is not None:
            started = is_reset[:, None, None]
            update = update + torch.where(started, decay, 0.0)[..., None] * initial.to(log_decay.dtype)
            decay = torch.where(started, 0.0, decay)
        return decay, update


def _after_last_reset(reset: Tensor) -> tuple[Tensor, Tensor]:
    """reset [B, T/CHUNK_LEN] -> which tokens [B,T] come after the last one, and which rows [B] have one."""
    later = reset.flip(1).cumsum(dim=1).flip(1) - reset.long()  # resets after a chunk's own
    return (later == 0).repeat_interleave(CHUNK_LEN, dim=1), reset.any(dim=1)
