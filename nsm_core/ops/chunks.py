"""What operators that work in chunks of tokens share."""

from __future__ import annotations

import torch
from torch import Tensor


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """x [B,T,...] -> [B, n, chunk, ...], with zeros behind the last token."""
    missing = -x.shape[1] % chunk
    if missing:
        x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), dim=1)
    return torch.unflatten(x, 1, (-1, chunk))


def exp_differences(total: Tensor) -> Tensor:
    """total [...,C], running sums -> [...,C,C]: exp(total[i] - total[j]) for j <= i, else zero."""
    difference = total[..., :, None] - total[..., None, :]
    is_later = torch.ones(difference.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    # masked before the exponential: above the diagonal it may overflow, and its gradient would not be a number
    return difference.masked_fill(is_later, -torch.inf).exp()
