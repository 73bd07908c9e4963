"""The convolution alone, in one pass, with the bits of the reference: each product and each sum is rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS = 8, 256  # of a program: 16 values for each of 128 threads


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    x_ptr,
    stride_b,
    stride_t,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_channels,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(2).to(tl.int64)
    is_channel = channels < num_channels
    mask = (tokens < num_tokens)[:, None] & is_channel[None, :]
    x_ptr += row * stride_b
    mixed = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for back in tl.static_range(TAPS):
        source = tokens + (TAPS - 1 - back)
        x = tl.load(x_ptr + source[:, None].to(tl.int64) * stride_t + channels[None, :], mask=mask, other=0.0)
        weight = tl.load(weight_ptr + (TAPS - 1 - back) * num_channels + channels, mask=is_channel, other=0.0)
        mixed = mixed + weight[None, :] * x.to(tl.float32)
    to = (row * num_tokens + tokens)[:, None] * num_channels + channels[None, :]
    tl.store(out_ptr + to, mixed.to(out_ptr.dtype.element_ty), mask=mask)


def convolve_rows(joined: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """joined [B, taps - 1 + T, D] with unit stride over D, weight [taps, D] fp32 -> [B,T,D] in `dtype`."""
    batch, length, num_channels = joined.shape
    taps = weight.shape[0]
    num_tokens = length - taps + 1
    out = joined.new_empty(batch, num_tokens, num_channels, dtype=dtype)
    grid = (triton.cdiv(num_channels, CHANNELS), triton.cdiv(num_tokens, TOKENS), batch)
    with torch.cuda.device_of(joined):
        _convolve[grid](
            joined,
            joined.stride(0),
            joined.stride(1),
            weight.contiguous(),
            out,
            num_tokens,
            num_channels,
            TAPS=taps,
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
            num_warps=4,
            enable_fp_fusion=False,  # a product is rounded before it is added
        )
    return out
