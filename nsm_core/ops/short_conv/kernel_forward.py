"""Convolution, SiLU and head norms in one pass: every input read once, every output written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.ops.short_conv.kernel_common import (
    convolve,
    launch_constants,
    load_tokens,
    num_chunks_of,
    row_length,
    with_unit_stride,
)


@triton.jit
def _forward(
    x_ptr,
    stride_b,
    stride_t,
    weight_ptr,
    tail_ptr,
    reset_ptr,
    lengths_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    new_tail_ptr,
    num_tokens,
    num_tiles,
    num_chunks,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAIL: tl.constexpr,
):
    C: tl.constexpr = 3 * H * K
    column, tile = tl.program_id(0) % (3 * H), tl.program_id(0) // (3 * H) % num_tiles
    row = (tl.program_id(0) // (3 * H) // num_tiles).to(tl.int64)
    in_head = tl.arange(0, CHANNELS)
    is_channel, channels = in_head < K, column * K + in_head
    first = tile * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    x_ptr += row * stride_b
    tail_ptr += row * (TAPS - 1) * C
    new_tail_ptr += row * (TAPS - 1) * C
    if reset_ptr is not None:
        reset_ptr += row * num_chunks
    mixed = convolve(
        x_ptr,
        stride_t,
        weight_ptr,
        tail_ptr,
        reset_ptr,
        channels,
        is_channel,
        first,
        num_tokens,
        C,
        TAPS,
        CHUNK,
        TOKENS,
    )
    active = mixed * tl.sigmoid(mixed)
    normed = active * tl.rsqrt(tl.sum(active * active, axis=1) / K + eps)[:, None]
    at = (row * num_tokens + tokens)[:, None] * (H * K) + column % H * K + in_head
    mask = (tokens < num_tokens)[:, None] & is_channel
    if column < H:
        tl.store(q_ptr + at, normed.to(q_ptr.dtype.element_ty), mask=mask)
    elif column < 2 * H:
        tl.store(k_ptr + at, normed.to(k_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(v_ptr + at, active.to(v_ptr.dtype.element_ty), mask=mask)
    # the new tail: of this tile's tokens those among the row's last, and the rest of the old tail
    length = row_length(lengths_ptr, row, num_tokens)
    if (first < length) & (first + TOKENS > length - TAPS + 1):
        x = load_tokens(
            x_ptr, stride_t, tail_ptr, None, channels, is_channel, first, 0, num_tokens, C, TAPS, CHUNK, TOKENS
        )
        to = tokens - length + TAPS - 1
        is_last = ((to >= 0) & (to < TAPS - 1) & (tokens < num_tokens))[:, None] & is_channel
        tl.store(new_tail_ptr + to[:, None] * C + channels, x, mask=is_last)
    if (tile == 0) & (length < TAPS - 1):
        to = tl.arange(0, TAIL)
        is_old = (to + length < TAPS - 1)[:, None] & is_channel
        old = tl.load(tail_ptr + (to + length)[:, None] * C + channels, mask=is_old, other=0.0)
        tl.store(new_tail_ptr + to[:, None] * C + channels, old, mask=is_old)


def short_conv_forward(
    qkv: Tensor,
    weight: Tensor,
    tail: Tensor,
    reset: Tensor | None,
    lengths: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `short_conv_reference`; qkv fp32, fp16 or bf16 with any row strides, weight and tail fp32."""
    qkv, constants = with_unit_stride(qkv), launch_constants(qkv, weight, num_heads)
    batch, num_tokens, _ = qkv.shape
    q, k, v = (qkv.new_empty(batch, num_tokens, num_heads, constants["K"]) for _ in range(3))
    new_tail = torch.empty_like(tail, memory_format=torch.contiguous_format)
    tiles = max(1, triton.cdiv(num_tokens, constants["TOKENS"]))
    with torch.cuda.device_of(qkv):
        _forward[(3 * num_heads * tiles * batch,)](
            qkv,
            qkv.stride(0),
            qkv.stride(1),
            weight.contiguous(),
            tail.contiguous(),
            None if reset is None else reset.contiguous(),
            lengths,
            q,
            k,
            v,
            new_tail,
            num_tokens,
            tiles,
            num_chunks_of(reset),
            eps,
            TAIL=triton.next_power_of_2(weight.shape[0] - 1),
            **constants,
        )
    return q, k, v, new_tail
