"""The mixing of neighbouring tokens in plain PyTorch: the specification of the kernels.

Equation (1) of the PULSE linear gate (docs/model.md): a depthwise causal convolution over a few tokens, SiLU, heads,
and RMSNorm without a gain on queries and keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN


def short_conv_reference(
    *,
    qkv: Tensor,
    weight: Tensor,
    tail: Tensor,
    num_heads: int,
    eps: float,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [B,T,3d], of which the first d channels are the queries; weight [taps,3d], its last row for the token itself;
    tail [B,taps-1,3d]: the tokens before the first.

    `reset` [B, T/CHUNK_LEN] bool: a document starts at this chunk and sees nothing before it. `lengths` [B]: tokens of
    right-padded rows. Returns q, k, v [B,T,H,K] in the dtype of qkv, and the tail after each row's last token.
    """
    dtype = torch.promote_types(qkv.dtype, weight.dtype)
    joined = torch.cat((tail.to(dtype), qkv.to(dtype)), dim=1)
    mixed = F.silu(convolve(joined, weight.to(dtype), reset))
    q, k, v = torch.unflatten(mixed, -1, (3, num_heads, -1)).unbind(-3)
    normed = (q.shape[-1],)
    q, k = F.rms_norm(q, normed, eps=eps), F.rms_norm(k, normed, eps=eps)
    new_tail = next_tail(joined, tail.shape[1], lengths).to(tail.dtype)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype), new_tail


def value_conv(
    *,
    v: Tensor,
    weight: Tensor,
    tail: Tensor,
    num_heads: int,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same of values alone, for slots that are not read by keys: v [B,T,d], weight [taps,d], tail [B,taps-1,d].

    Returns v [B,T,H,K] and the new tail.
    """
    dtype = torch.promote_types(v.dtype, weight.dtype)
    joined = torch.cat((tail.to(dtype), v.to(dtype)), dim=1)
    mixed = F.silu(convolve(joined, weight.to(dtype), reset))
    new_tail = next_tail(joined, tail.shape[1], lengths).to(tail.dtype)
    return torch.unflatten(mixed, -1, (num_heads, -1)).to(v.dtype), new_tail


def convolve(joined: Tensor, weight: Tensor, reset: Tensor | None) -> Tensor:
    """joined [B, taps - 1 + T, D] (the tail, then the tokens), weight [taps, D] -> [B,T,D]; `reset` as above."""
    taps, num_tokens = weight.shape[0], joined.shape[1] - weight.shape[0] + 1
    mixed = joined.new_zeros(joined.shape[0], num_tokens, joined.shape[2])
    for back in range(taps):
        start = taps - 1 - back
        shifted = joined[:, start : start + num_tokens]
        if reset is not None and back > 0:
            shifted = torch.where(_crosses_start(reset, num_tokens, back), 0.0, shifted)
        mixed = mixed + weight[start] * shifted
    return mixed


def _crosses_start(reset: Tensor, num_tokens: int, back: int) -> Tensor:
    """[B,T,1] bool: the token `back` places earlier belongs to the document before."""
    offset = torch.arange(num_tokens, device=reset.device) % CHUNK_LEN
    starts = reset.repeat_interleave(CHUNK_LEN, dim=1)[:, :num_tokens]
    return (starts & (offset < back))[..., None]


def next_tail(joined: Tensor, tail_len: int, lengths: Tensor | None) -> Tensor:
    """The last `tail_len` of `joined` up to each row's last token."""
    if lengths is None:
        return joined[:, joined.shape[1] - tail_len :]
    index = lengths[:, None] + torch.arange(tail_len, device=lengths.device)
    return joined.gather(1, index[..., None].expand(-1, -1, joined.shape[-1]))
