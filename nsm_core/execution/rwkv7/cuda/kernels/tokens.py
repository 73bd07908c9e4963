"""What is done for each token by itself: the embedding, norms, and the mixing with the token before it.

`rows` [T]: the pool's row of each token, negative for padding, for which nothing is done. `offsets` [T]: twice the
token's number in its piece of text, from 0, and one more for the last of the piece. The first token of a piece finds
the token before it in the state. The last one is written there by the kernel after the one that normalised it, when no
program reads the state any more.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, wait_for_previous


@triton.jit
def _normed(x, gain, bias, is_channel, eps, D: tl.constexpr):
    """Rows of x [N, WIDTH]; zero where there is no channel."""
    centred = tl.where(is_channel, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / D + eps)
    return centred * factor[:, None] * gain + bias


@triton.jit
def _begin(
    rows_ptr,
    offsets_ptr,
    ids_ptr,
    embedding_ptr,
    gain_ptr,
    bias_ptr,
    position_ptr,
    x_ptr,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0)
    row, offset = tl.load(rows_ptr + token), tl.load(offsets_ptr + token)
    if row < 0:
        return
    if offset % 2 == 1:
        position = tl.load(position_ptr + row)
        tl.debug_barrier()  # every thread has read the position before one of them moves it on
        tl.store(position_ptr + row, position + offset // 2 + 1)
    channels = tl.arange(0, WIDTH)[None, :]
    is_channel = channels < D
    at = embedding_ptr + tl.load(ids_ptr + token) * D + channels
    x = tl.load(at, mask=is_channel, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + channels, mask=is_channel, other=0.0)
    bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0)
    tl.store(x_ptr + token.to(tl.int64) * D + channels, _normed(x, gain, bias, is_channel, eps, D), mask=is_channel)


@triton.jit
def _keep(retained_ptr, retained_shift_ptr, token, row, offset, D: tl.constexpr, WIDTH: tl.constexpr):
    """What the norm before made of a piece's last token goes into the state."""
    channels = tl.arange(0, WIDTH)
    is_retained = (channels < D) & (offset % 2 == 1)
    retained = tl.load(retained_ptr + token.to(tl.int64) * D + channels, mask=is_retained)
    tl.store(retained_shift_ptr + row * D + channels, retained, mask=is_retained)


@triton.jit
def _mix(
    rows_ptr,
    offsets_ptr,
    x_ptr,
    gain_ptr,
    bias_ptr,
    shares_ptr,
    shift_ptr,
    retained_ptr,
    retained_shift_ptr,
    normed_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    token = tl.program_id(0)
    row, offset = tl.load(rows_ptr + token), tl.load(offsets_ptr + token)
    if row < 0:
        return
    if retained_ptr is not None:
        _keep(retained_ptr, retained_shift_ptr, token, row, offset, D, WIDTH)
    # the token before and this one, normalised by the same instructions: its bits do not depend on where it stands
    which, channels = tl.arange(0, 2)[:, None], tl.arange(0, WIDTH)[None, :]
    is_channel, is_first = channels < D, offset < 2
    is_there = is_channel & ((which == 1) | (offset >= 2))
    pair = tl.load(x_ptr + (token - 1 + which).to(tl.int64) * D + channels, mask=is_there, other=0.0)
    gain = tl.load(gain_ptr + channels, mask=is_channel, other=0.0)
    bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0)
    normed = _normed(pair, gain, bias, is_channel, eps, D)
    own = tl.sum(tl.where(which == 1, normed, 0.0), axis=0)
    before = tl.sum(tl.where(which == 0, normed, 0.0), axis=0)
    flat = tl.arange(0, WIDTH)
    carried = tl.load(shift_ptr + row * D + flat, mask=(flat < D) & is_first, other=0.0)
    before = tl.where(is_first, carried, before)
    tl.store(normed_ptr + token.to(tl.int64) * D + flat, own, mask=(flat < D) & (offset % 2 == 1))
    out_ptr += token.to(tl.int64) * (N * D)
    for index in tl.static_range(N):
        share = tl.load(shares_ptr + index * D + flat, mask=flat < D, other=0.0)
        mixed = own + (before - own) * share
        tl.store(out_ptr + index * D + flat, mixed.to(out_ptr.dtype.element_ty), mask=flat < D)


@triton.jit
def _end(
    rows_ptr,
    offsets_ptr,
    x_ptr,
    gain_ptr,
    bias_ptr,
    retained_ptr,
    retained_shift_ptr,
    out_ptr,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    token = tl.program_id(0)
    row, offset = tl.load(rows_ptr + token), tl.load(offsets_ptr + token)
    if row < 0:
        return
    if retained_ptr is not None:
        _keep(retained_ptr, retained_shift_ptr, token, row, offset, D, WIDTH)
    channels = tl.arange(0, WIDTH)[None, :]
    is_channel = channels < D
    x = tl.load(x_ptr + token.to(tl.int64) * D + channels, mask=is_channel, other=0.0)
    gain = tl.load(gain_ptr + channels, mask=is_channel, other=0.0)
    bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0)
    hidden = _normed(x, gain, bias, is_channel, eps, D).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * D + channels, hidden, mask=is_channel)


@dataclasses.dataclass(frozen=True, slots=True)
class Gains:
    """A LayerNorm's gain and offset [D], fp32."""

    weight: Tensor
    bias: Tensor
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class Retained:
    """normed [T,D]: what a norm made of the last token of each piece; shift [rows of the pool, D]: where it goes."""

    normed: Tensor
    shift: Tensor


def begin(
    *, rows: Tensor, offsets: Tensor, ids: Tensor, embedding: Tensor, norm: Gains, position: Tensor, x: Tensor
) -> None:
    """embedding [V,D] -> x [T,D] fp32, normalised; position [rows of the pool] int64 is moved on."""
    width = embedding.shape[1]
    _begin[(len(rows),)](
        *(rows, offsets, ids, embedding, norm.weight, norm.bias, position, x, norm.eps),
        D=width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=warps(width),
    )


def mix(
    *,
    rows: Tensor,
    offsets: Tensor,
    x: Tensor,
    norm: Gains,
    shares: Tensor,
    retained: Retained | None,
    into: Retained,
    out: Tensor,
    is_chained: bool,
) -> None:
    """x [T,D] fp32, shares [N,D] fp32 -> out [T, N D]: the normalised token mixed with the one before it, N times.

    `into`: this norm's own, whose state is read; `retained`: of the norm before, which is written now.
    """
    width = x.shape[1]
    _mix[(len(rows),)](
        *(rows, offsets, x, norm.weight, norm.bias, shares, into.shift),
        None if retained is None else retained.normed,
        None if retained is None else retained.shift,
        *(into.normed, out, norm.eps),
        N=len(shares),
        D=width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=warps(width),
        **chained(is_chained),
    )


def end(
    *, rows: Tensor, offsets: Tensor, x: Tensor, norm: Gains, retained: Retained | None, out: Tensor, is_chained: bool
) -> None:
    """x [T,D] fp32 -> out [T,D], normalised."""
    width = x.shape[1]
    _end[(len(rows),)](
        *(rows, offsets, x, norm.weight, norm.bias),
        None if retained is None else retained.normed,
        None if retained is None else retained.shift,
        *(out, norm.eps),
        D=width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=warps(width),
        **chained(is_chained),
    )


def warps(width: int) -> int:
    """Of a program that holds a row of a model of this width."""
    return 4 if width <= 2048 else 8
