"""What the kernels of the short convolution share.

A program handles one head's channels of one of q, k, v for a few tokens; bf16 in memory, fp32 in registers. Earlier
tokens are read again for every tap, which the first-level cache serves.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN

# Channels of a head, rounded up to a power of two -> (tokens a program, warps): 16 values a thread.
TILES = {16: (128, 4), 32: (64, 4), 64: (16, 2), 128: (32, 8), 256: (16, 8)}
LARGER_TILE = (8, 8)
DECODE_TILE = (4, 1)  # for rows of a few tokens


@triton.jit
def crosses_start(reset_ptr, tokens, back, num_tokens, CHUNK: tl.constexpr):
    """[R] bool: `back` tokens before these lies another document. `reset_ptr` is that of the row."""
    is_token = (tokens >= 0) & (tokens < num_tokens)
    starts = tl.load(reset_ptr + tokens // CHUNK, mask=is_token, other=0)
    return (starts != 0) & (tokens % CHUNK < back)


@triton.jit
def load_tokens(
    x_ptr,
    stride_t,
    tail_ptr,
    reset_ptr,
    channels,
    is_channel,
    first,
    back,
    num_tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """[TOKENS, K] fp32: the tokens `back` positions before those from `first` on; pointers of the row."""
    tokens = first + tl.arange(0, TOKENS)
    source = tokens - back
    is_seen = tokens < num_tokens
    if reset_ptr is not None and back > 0:
        is_seen &= crosses_start(reset_ptr, tokens, back, num_tokens, CHUNK) == 0
    mask = (is_seen & (source >= 0))[:, None] & is_channel
    x = tl.load(x_ptr + source[:, None].to(tl.int64) * stride_t + channels, mask=mask, other=0.0).to(tl.float32)
    if first < back:
        mask = (is_seen & (source < 0))[:, None] & is_channel
        x += tl.load(tail_ptr + (source + TAPS - 1)[:, None] * C + channels, mask=mask, other=0.0)
    return x


@triton.jit
def convolve(
    x_ptr,
    stride_t,
    weight_ptr,
    tail_ptr,
    reset_ptr,
    channels,
    is_channel,
    first,
    num_tokens,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """[TOKENS, K] fp32: each token and the TAPS - 1 before it, weighted."""
    mixed = tl.zeros([TOKENS, channels.shape[0]], tl.float32)
    for back in tl.static_range(TAPS):
        x = load_tokens(
            x_ptr, stride_t, tail_ptr, reset_ptr, channels, is_channel, first, back, num_tokens, C, TAPS, CHUNK, TOKENS
        )
        mixed += tl.load(weight_ptr + (TAPS - 1 - back) * C + channels, mask=is_channel, other=0.0) * x
    return mixed


@triton.jit
def row_length(lengths_ptr, row, num_tokens):
    length = num_tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row).to(tl.int32)
    return length


def launch_constants(qkv: Tensor, weight: Tensor, num_heads: int) -> dict[str, Any]:
    head_dim = qkv.shape[-1] // (3 * num_heads)
    channels = max(16, triton.next_power_of_2(head_dim))
    tokens, num_warps = TILES.get(channels, LARGER_TILE)
    if qkv.shape[1] <= DECODE_TILE[0]:
        tokens, num_warps = DECODE_TILE
    return {
        "H": num_heads,
        "K": head_dim,
        "TAPS": weight.shape[0],
        "CHUNK": CHUNK_LEN,
        "TOKENS": tokens,
        "CHANNELS": channels,
        "num_warps": num_warps,
    }


def with_unit_stride(qkv: Tensor) -> Tensor:
    return qkv if qkv.stride(-1) == 1 else qkv.contiguous()


def num_chunks_of(reset: Tensor | None) -> int:
    return 0 if reset is None else reset.shape[1]
