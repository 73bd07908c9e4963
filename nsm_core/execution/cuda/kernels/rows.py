"""What a step does once for each row: embedding and position at its start, the last norm at its end.

A row of a batch names the pool's row that it works on; a negative one is padding, for which nothing is done.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

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
    tl.store(x_ptr + index * x_stride + channels, x, mask=is_channel)
    if turns_ptr is not None:
        pairs = tl.arange(0, ANGLES)
        # whole turns leave in fp64: of a position of a million an fp32 angle would be off by a twentieth of a radian
        turns = position.to(tl.float64) * tl.load(turns_ptr + pairs, mask=pairs < HALF, other=0.0)
        angles = (turns - tl.floor(turns)).to(tl.float32) * turn
        tl.store(cos_ptr + index * HALF + pairs, tl.cos(angles), mask=pairs < HALF)
        tl.store(sin_ptr + index * HALF + pairs, tl.sin(angles), mask=pairs < HALF)


@triton.jit
def _final_norm(
    rows_ptr, x_ptr, x_stride, gain_ptr, hidden_ptr, hidden_stride, eps, D: tl.constexpr, WIDTH: tl.constexpr
):
    index = tl.program_id(0)
    if tl.load(rows_ptr + index) < 0:
        return
    channels = tl.arange(0, WIDTH)
    is_channel = channels < D
    x = tl.load(x_ptr + index * x_stride + channels, mask=is_channel, other=0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    gain = tl.load(gain_ptr + channels, mask=is_channel, other=0.0)
    tl.store(hidden_ptr + index * hidden_stride + channels, x * factor * gain, mask=is_channel)


def begin_step(
    *,
    rows: Tensor,
    ids: Tensor,
    embedding: Tensor,
    factor: float,
    position: Tensor,
    start: Tensor,
    x: Tensor,
    turns: Tensor | None,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """rows, ids [B] int64; embedding [V,d] fp32; position [rows of the pool] int64, moved on by one.

    Writes x [B, >= d], `start` [B]: the position before this token; and with `turns` [K/2] fp64, turns of each
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
        x,
        x.stride(0),
        turns,
        cos,
        sin,
        TURN,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        HALF=cos.shape[1],
        ANGLES=triton.next_power_of_2(cos.shape[1]),
        num_warps=1,
    )


def final_norm(*, rows: Tensor, x: Tensor, gain: Tensor, hidden: Tensor, eps: float) -> None:
    """x [B, >= d] fp32 -> hidden [B, >= d] fp32, normalised."""
    width = gain.shape[0]
    _final_norm[(rows.shape[0],)](
        rows,
        x,
        x.stride(0),
        gain,
        hidden,
        hidden.stride(0),
        eps,
        D=width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )
