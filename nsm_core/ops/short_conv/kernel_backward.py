"""The backward pass of the short convolution: to the convolution's output, then to its input.

The second kernel convolves what the first wrote with the taps in reverse. The gradient of the weight is the sum of what
each program of the first found for its tokens, so that it does not depend on the order in which they run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.ops.short_conv.kernel_common import (
    convolve,
    crosses_start,
    launch_constants,
    load_tokens,
    num_chunks_of,
    row_length,
    with_unit_stride,
)


@triton.jit
def _backward_to_mixed(
    x_ptr,
    stride_b,
    stride_t,
    weight_ptr,
    tail_ptr,
    reset_ptr,
    d_q_ptr,
    d_k_ptr,
    d_v_ptr,
    d_mixed_ptr,
    d_weight_ptr,
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
):
    """The gradient of the convolution's output [B,T,3d], and each program's part [TAPS, K] of the weight's."""
    C: tl.constexpr = 3 * H * K
    column, part = tl.program_id(0) % (3 * H), (tl.program_id(0) // (3 * H)).to(tl.int64)
    tile, row = (part % num_tiles).to(tl.int32), part // num_tiles
    in_head = tl.arange(0, CHANNELS)
    is_channel, channels = in_head < K, column * K + in_head
    first = tile * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    x_ptr += row * stride_b
    tail_ptr += row * (TAPS - 1) * C
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
    gate = tl.sigmoid(mixed)
    at = (row * num_tokens + tokens)[:, None] * (H * K) + column % H * K + in_head
    mask = (tokens < num_tokens)[:, None] & is_channel
    if column < H:
        grad = tl.load(d_q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    elif column < 2 * H:
        grad = tl.load(d_k_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        grad = tl.load(d_v_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if column < 2 * H:
        active = mixed * gate
        inverse = tl.rsqrt(tl.sum(active * active, axis=1) / K + eps)[:, None]
        normed = active * inverse
        grad = inverse * (grad - normed * (tl.sum(grad * normed, axis=1) / K)[:, None])
    grad *= gate * (1.0 + mixed * (1.0 - gate))
    at = (row * num_tokens + tokens)[:, None] * C + channels
    tl.store(d_mixed_ptr + at, grad.to(d_mixed_ptr.dtype.element_ty), mask=mask)
    for back in tl.static_range(TAPS):
        x = load_tokens(
            x_ptr, stride_t, tail_ptr, reset_ptr, channels, is_channel, first, back, num_tokens, C, TAPS, CHUNK, TOKENS
        )
        d_tap = tl.sum(grad * x, axis=0)
        tl.store(d_weight_ptr + (part * TAPS + TAPS - 1 - back) * C + channels, d_tap, mask=is_channel)


@triton.jit
def _backward_to_input(
    d_mixed_ptr,
    weight_ptr,
    reset_ptr,
    lengths_ptr,
    d_new_tail_ptr,
    d_x_ptr,
    d_tail_ptr,
    num_tokens,
    num_tiles,
    num_chunks,
    H: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradients of the tokens and of the tail before them, from their part in themselves and later tokens."""
    C: tl.constexpr = 3 * H * K
    column, tile = tl.program_id(0) % (3 * H), tl.program_id(0) // (3 * H) % num_tiles
    row = (tl.program_id(0) // (3 * H) // num_tiles).to(tl.int64)
    in_head = tl.arange(0, CHANNELS)
    is_channel, channels = in_head < K, column * K + in_head
    tokens = tile * TOKENS + tl.arange(0, TOKENS) - (TAPS - 1)  # the tail has the places before 0
    if reset_ptr is not None:
        reset_ptr += row * num_chunks
    d_x = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for back in tl.static_range(TAPS):
        reader = tokens + back
        mask = ((reader >= 0) & (reader < num_tokens))[:, None] & is_channel
        if reset_ptr is not None and back > 0:
            mask &= (crosses_start(reset_ptr, reader, back, num_tokens, CHUNK) == 0)[:, None]
        grad = tl.load(d_mixed_ptr + (row * num_tokens + reader)[:, None] * C + channels, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + (TAPS - 1 - back) * C + channels, mask=is_channel, other=0.0)
        d_x += weight * grad.to(tl.float32)
    tail_at = row * (TAPS - 1) * C + channels
    if d_new_tail_ptr is not None:
        source = tokens - row_length(lengths_ptr, row, num_tokens) + TAPS - 1
        is_last = ((source >= 0) & (source < TAPS - 1))[:, None] & is_channel
        d_x += tl.load(d_new_tail_ptr + source[:, None] * C + tail_at, mask=is_last, other=0.0)
    is_token = ((tokens >= 0) & (tokens < num_tokens))[:, None] & is_channel
    at = (row * num_tokens + tokens)[:, None] * C + channels
    tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=is_token)
    is_tail = (tokens < 0)[:, None] & is_channel
    tl.store(d_tail_ptr + (tokens + TAPS - 1)[:, None] * C + tail_at, d_x, mask=is_tail)


def short_conv_backward(
    qkv: Tensor,
    weight: Tensor,
    tail: Tensor,
    reset: Tensor | None,
    lengths: Tensor | None,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_new_tail: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to qkv, weight and tail."""
    qkv, weight, tail = with_unit_stride(qkv), weight.contiguous(), tail.contiguous()
    reset = None if reset is None else reset.contiguous()
    constants = launch_constants(qkv, weight, num_heads)
    batch, num_tokens, _ = qkv.shape
    d_mixed, d_qkv = (torch.empty_like(qkv, memory_format=torch.contiguous_format) for _ in range(2))
    d_tail = torch.empty_like(tail)
    tiles = triton.cdiv(num_tokens, constants["TOKENS"])
    parts = weight.new_empty(batch * tiles, *weight.shape)
    with torch.cuda.device_of(qkv):
        _backward_to_mixed[(3 * num_heads * tiles * batch,)](
            qkv,
            qkv.stride(0),
            qkv.stride(1),
            weight,
            tail,
            reset,
            d_q.contiguous(),
            d_k.contiguous(),
            d_v.contiguous(),
            d_mixed,
            parts,
            num_tokens,
            tiles,
            num_chunks_of(reset),
            eps,
            **constants,
        )
        tiles = triton.cdiv(num_tokens + weight.shape[0] - 1, constants["TOKENS"])
        _backward_to_input[(3 * num_heads * tiles * batch,)](
            d_mixed,
            weight,
            reset,
            lengths,
            None if d_new_tail is None else d_new_tail.contiguous(),
            d_qkv,
            d_tail,
            num_tokens,
            tiles,
            num_chunks_of(reset),
            **constants,
        )
    return d_qkv, parts.sum(dim=0), d_tail
