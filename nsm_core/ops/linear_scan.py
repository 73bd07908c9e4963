"""A linear recurrence for every channel on its own, all tokens at once: h[t] = a[t] * h[t-1] + b[t]."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_scan(decay: Tensor, update: Tensor, initial: Tensor) -> Tensor:
    """decay a, update b [B,T,d]; initial h [B,d] -> h after every token [B,T,d].

    By doubling (Hillis and Steele 1986): after pass i an entry covers the 2**i tokens up to its own, so there are
    log2(T) passes over the tensors. The products of decays only ever shrink: nothing overflows.
    """
    update = torch.cat((update[:, :1] + decay[:, :1] * initial[:, None], update[:, 1:]), dim=1)
    distance = 1
    while distance < update.shape[1]:
        older = update[:, :-distance]
        update = torch.cat((update[:, :distance], update[:, distance:] + decay[:, distance:] * older), dim=1)
        joined = decay[:, distance:] * decay[:, :-distance]
        decay = torch.cat((decay[:, :distance], joined), dim=1)
        distance *= 2
    return update
