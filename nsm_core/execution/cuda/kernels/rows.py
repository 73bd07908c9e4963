"""What a step does once for each row: embedding and position at its start, the last norm at its end.

A row of a batch names the pool's row that it works on; a negative one is padding, for which nothing is done.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, wait_for_previous
from nsm_core.execution.cuda.kernels.linear import Stream, truncated

TURN = 2 * math.pi


@triton.jit
def _begin(
    rows_ptr,
    ids_ptr,
    embedding_ptr,
    factor,
    position_ptr,
    start_ptr,
    x_ptr,
    low_ptr,
    high_ptr,
    rest_ptr,
    squares_ptr,
    x_stride,
    turns_ptr,
    cos_ptr,
    sin_ptr,
    turn,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ANGLES: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    if row < 0:
        return
    position = tl.load(position_ptr + row)
    tl.debug_barrier()  # every thread has read the position before one of them moves it on
    tl.store(position_ptr + row, position + 1)
    tl.store(start_ptr + index, position)
    channels = tl.arange(0, WIDTH)
    is_channel = channels < D
    x = tl.load(embedding_ptr + tl.load(ids_ptr + index) * D + channels, mask=is_channel, other=0.0) * factor
    at = index * x_stride + channels
    high = truncated(x)
    tl.store(x_ptr + at, x, mask=is_channel)
    tl.store(high_ptr + at, high, mask=is_channel)
    tl.store(rest_ptr + at, x - high, mask=is_channel)
    if low_ptr is not None:
        tl.store(low_ptr + at, x.to(low_ptr.dtype.element_ty), mask=is_channel)
    parts = tl.arange(0, WIDTH // 16)
    squares = tl.sum(tl.reshape(x * x, [WIDTH // 16, 16]), axis=1)
    tl.store(squares_ptr + index * (x_stride // 16) + parts, squares, mask=parts < x_stride // 16)
    if turns_ptr is not None:
        pairs = tl.arange(0, ANGLES)
        # whole turns leave in fp64: of a position of a million an fp32 angle would be off by a twentieth of a radian
        turns = position.to(tl.float64) * tl.load(turns_ptr + pairs, mask=pairs < HALF, other=0.0)
        angles = (turns - tl.floor(turns)).to(tl.float32) * turn
        tl.store(cos_ptr + index * HALF + pairs, tl.cos(angles), mask=pairs < HALF)
        tl.store(sin_ptr + index * HALF + pairs, tl.sin(angles), mask=pairs < HALF)


@triton.jit
def _final_norm(
    rows_ptr,
    x_ptr,
    x_stride,
    gain_ptr,
    hidden_ptr,
    hidden_stride,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    index = tl.program_id(0)
    if tl.load(rows_ptr + index) < 0:
        return
    channels = tl.arange(0, WIDTH)
    is_channel = channels < D
    x = tl.load(x_ptr + index * x_stride + channels, mask=is_channel, other=0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    gain = tl.load(gain_ptr + channels, mask=is_channel, other=0.0)
    hidden = (x * factor * gain).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + index * hidden_stride + channels, hidden, mask=is_channel)


def begin_step(
    *,
    rows: Tensor,
    ids: Tensor,
    embedding: Tensor,
    factor: float,
    position: Tensor,
    start: Tensor,
    x: Stream,
    turns: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """rows, ids [B] int64; embedding [V,d] fp32; position [rows of the pool] int64, moved on by one.

    Writes x, `start` [B]: the position before this token; and with `turns` [K/2] fp64, turns of each
    pair a token, cos and sin [B, K/2].
    """
    width = embedding.shape[1]
    _begin[(rows.shape[0],)](
        rows,
        ids,
        embedding,
        factor,
        position,
        start,
        x.full,
        None if x.low is x.full else x.low,
        x.high,
        x.rest,
        x.squares,
        x.full.stride(0),
        turns,
        cos,
        sin,
        TURN,
        D=width,
        WIDTH=max(16, triton.next_power_of_2(width)),
        HALF=cos.shape[1],
        ANGLES=triton.next_power_of_2(cos.shape[1]),
        num_warps=1,
    )


def final_norm(*, rows: Tensor, x: Stream, gain: Tensor, hidden: Tensor, eps: float, is_chained: bool) -> None:
    """x [B, >= d] -> hidden [B, >= d], normalised."""
    width = gain.shape[0]
    _final_norm[(rows.shape[0],)](
        rows,
        x.full,
        x.full.stride(0),
        gain,
        hidden,
        hidden.stride(0),
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
        **chained(is_chained),
    )
