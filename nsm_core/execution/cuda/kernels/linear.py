"""A linear layer fused with its surroundings: the norm before, gate, bias and residual after.

A program makes ROWS x COLS outputs and runs over the whole input width itself, in one order of summation. What a row
gives does therefore not depend on how many rows there are, nor on the width of a tile: batches of any size give the
same bits.

The norm's gain is part of the weight, and its factor, one number a row, is applied to the sums: normalised inputs are
never written. The residual stream lies in memory in each form that a product reads (`Stream`), so that a tile of it
goes to the matrix units as it is, and many tiles are under way at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import (
    LINE,
    chained,
    end_beside,
    let_next_begin,
    prefetch,
    wait_for_previous,
)

DEPTH = 64  # inputs of a step of the sum; widths are padded to multiples of it
ROWS = 64  # the smallest tile of the matrix units that sum in the way of the large ones
# Outputs of a program -> steps in flight. Wide programs read less twice, narrow ones are many: both keep a device busy.
STAGES = {16: 6, 32: 5, 64: 4, 128: 4}
ENOUGH_PROGRAMS = 96  # nearly one for each multiprocessor of a large device
# In fp32 a tile takes twice the memory, and its products three times the registers.
FP32_COLUMNS, FP32_STAGES = 32, 3
FEW_ROWS, SPLIT_COLUMNS = 256, 16


@triton.jit
def _factor(squares_ptr, rows, is_row, width, eps, PARTS: tl.constexpr):
    """[ROWS]: each row's normalisation factor, from PARTS sums of squares.

    One after the other: the order of a sum over an axis depends on the shape of the tile around it.
    """
    squares = tl.zeros_like(rows).to(tl.float32)
    for part in tl.static_range(PARTS):
        squares += tl.load(squares_ptr + rows.to(tl.int64) * PARTS + part, mask=is_row, other=0.0)
    return 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def _fetch_weight(weight_ptr, columns, depth, LINES: tl.constexpr, PER_LINE: tl.constexpr):
    if tl.num_programs(1) == 1:  # with more rows, as many programs would ask for the same
        lines = tl.minimum(tl.arange(0, LINES) * PER_LINE, depth - 1)
        prefetch(weight_ptr + columns[:, None].to(tl.int64) * depth + lines[None, :])


@triton.jit
def _begin_in_chain(
    weight_ptr,
    to_second,
    columns,
    depth,
    SECOND: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    BESIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The weight is on its way before the inputs are there."""
    if CHAINED:
        _fetch_weight(weight_ptr, columns, depth, LINES, PER_LINE)
        if SECOND:
            _fetch_weight(weight_ptr + to_second, columns, depth, LINES, PER_LINE)
    if BESIDE:
        let_next_begin(CHAINED)
    else:
        wait_for_previous(CHAINED)


@triton.jit
def _with_gate_and_bias(total, values, bias_ptr, columns, is_column, GATED: tl.constexpr):
    if GATED:
        total = total * tl.sigmoid(total) * values
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0)[None, :]
    return total


@triton.jit
def _store_stream(total, rows, columns, at, mask, low_ptr, high_ptr, rest_ptr, squares_ptr, squares_stride):
    """What products read of the stream beside its whole numbers, and of each 16 of them the sum of squares."""
    if low_ptr is not None:
        tl.store(low_ptr + at, total.to(low_ptr.dtype.element_ty), mask=mask)
    high = truncated(total)
    tl.store(high_ptr + at, high, mask=mask)
    tl.store(rest_ptr + at, total - high, mask=mask)
    num_rows: tl.constexpr = total.shape[0]
    parts: tl.constexpr = total.shape[1] // 16
    squares = tl.sum(tl.reshape(total * total, [num_rows, parts, 16]), axis=2)
    part = tl.min(columns, axis=0) // 16 + tl.arange(0, parts)
    to = squares_ptr + rows[:, None].to(tl.int64) * squares_stride + part[None, :]
    is_row = tl.max(mask.to(tl.int32), axis=1) > 0
    tl.store(to, squares, mask=is_row[:, None] & (part < squares_stride)[None, :])


@triton.jit
def truncated(x):
    """What TF32 holds of fp32 values."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows", "width"])  # a program for one row more must not be another program
def _linear(
    x_ptr,
    rest_ptr,
    squares_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    low_ptr,
    high_ptr,
    rest_out_ptr,
    squares_out_ptr,
    out_stride,
    num_rows,
    num_columns,
    depth,
    width,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BESIDE: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    IS_PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inner = tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_at = rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    weight_at = weight_ptr + columns[None, :].to(tl.int64) * depth + inner[:, None]
    to_second = num_columns.to(tl.int64) * depth  # the second half of a gated or a split weight
    _begin_in_chain(
        weight_ptr, to_second, tl.minimum(columns, num_columns - 1), depth, SECOND, LINES, PER_LINE, BESIDE, CHAINED
    )
    total = tl.zeros([ROWS, COLS], tl.float32)
    values = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):
        is_input = is_row[:, None]
        if not IS_PADDED:  # memory behind it is the next row's
            is_input = is_input & (start + inner < width)[None, :]
        x = tl.load(x_ptr + x_at, mask=is_input, other=0.0)
        weight = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        if SECOND:
            second = tl.load(weight_at + to_second, mask=is_column[None, :], other=0.0)
        if rest_ptr is not None:
            x_rest = tl.load(rest_ptr + x_at, mask=is_row[:, None], other=0.0)
            total = tl.dot(x_rest, weight, total, input_precision=PRECISION)
            total = tl.dot(x, second, total, input_precision=PRECISION)
        total = tl.dot(x.to(weight.dtype), weight, total, input_precision=PRECISION)
        if GATED:
            values = tl.dot(x.to(weight.dtype), second, values, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if NORM:
        factor = _factor(squares_ptr, rows, is_row, width, eps, PARTS)
        total *= factor[:, None]
        values *= factor[:, None]
    total = _with_gate_and_bias(total, values, bias_ptr, columns, is_column, GATED)
    at = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
    if residual_ptr is not None:
        _store_stream(
            total, rows, columns, at, mask, low_ptr, high_ptr, rest_out_ptr, squares_out_ptr, out_stride // 16
        )
    if BESIDE:
        end_beside(CHAINED)


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A weight as the kernel reads it: [N, depth], or [2 N, depth] with gates before values, or split (`split`).

    `depth` is the input width padded to a multiple of DEPTH with zeros; `is_normed`: the input is normalised first,
    over its `width`, and the gain is part of the weight.
    """

    weight: Tensor
    width: int
    is_normed: bool = False
    is_gated: bool = False
    is_split: bool = False
    bias: Tensor | None = None
    eps: float = 0.0

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0] // (2 if self.is_gated or self.is_split else 1)

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Rows of fp32, [B, padded width] each: whole, in the dtype of the products, and split into what TF32 holds and the
    rest. Zero beyond the width. With products of fp32, `low` is `full` itself. squares [B, padded width / 16]: their
    sum over each 16 values of `full`.
    """

    full: Tensor
    low: Tensor
    high: Tensor
    rest: Tensor
    squares: Tensor

    def rows(self, rows: slice) -> Stream:
        """Some rows, in the same memory."""
        return Stream(self.full[rows], self.low[rows], self.high[rows], self.rest[rows], self.squares[rows])


def make_stream(batch: int, width: int, dtype: torch.dtype, device: torch.device) -> Stream:
    """Zeros. `dtype`: of the products."""
    full, high, rest = torch.zeros(3, batch, padded(width), device=device)
    squares = torch.zeros(batch, full.shape[1] // 16, device=device)
    return Stream(full, full if dtype == torch.float32 else torch.zeros_like(full, dtype=dtype), high, rest, squares)


def split(weight: Tensor) -> Tensor:
    """[N, depth] fp32 -> [2 N, depth]: its TF32 part, then the remainder. Three products keep fp32's digits."""
    high = (weight.view(torch.int32) & -8192).view(torch.float32)
    return torch.cat((high, weight - high)).contiguous()


def padded(width: int) -> int:
    """The width that an input of a `Linear` has in memory."""
    return -(-width // DEPTH) * DEPTH


def tile_columns(linear: Linear, num_rows: int) -> int:
    """Outputs of a program: as many as leave enough programs."""
    if linear.weight.dtype == torch.float32:
        return SPLIT_COLUMNS if linear.is_split and num_rows <= FEW_ROWS else FP32_COLUMNS
    row_tiles = -(-num_rows // ROWS)
    widths = [width for width in STAGES if width <= (64 if linear.is_gated else 128)]
    wide_enough = [width for width in widths if row_tiles * (linear.num_outputs // width) >= ENOUGH_PROGRAMS]
    return max(wide_enough, default=min(widths))


def run_linear(
    linear: Linear,
    x: Tensor | Stream,
    out: Tensor | Stream,
    *,
    columns: int | None = None,
    is_chained: bool = False,
    is_beside: bool = False,
) -> None:
    """x [B, depth], a stream where the layer normalises it, -> out [B, >= N]; a stream is added to, in all its forms.

    x has zeros beyond the width, or ends there: [B, width]. `columns` of a tile change no bit; None: chosen here.
    `is_chained`: see chain.py; and `is_beside`: the kernel before makes nothing that this one reads.
    """
    to = out.full if isinstance(out, Stream) else out
    given = x if isinstance(x, Tensor) else x.high if linear.is_split else x.low
    is_fp32 = linear.weight.dtype == torch.float32
    num_rows, depth = given.shape[0], linear.weight.shape[1]
    columns = columns or tile_columns(linear, num_rows)
    per_line = LINE // linear.weight.element_size()
    _linear[(triton.cdiv(linear.num_outputs, columns), triton.cdiv(num_rows, ROWS))](
        given,
        x.rest if isinstance(x, Stream) and linear.is_split else None,
        x.squares if isinstance(x, Stream) else None,
        given.stride(0),
        linear.weight,
        linear.bias,
        to if isinstance(out, Stream) else None,
        to,
        out.low if isinstance(out, Stream) and out.low is not out.full else None,
        out.high if isinstance(out, Stream) else None,
        out.rest if isinstance(out, Stream) else None,
        out.squares if isinstance(out, Stream) else None,
        to.stride(0),
        num_rows,
        linear.num_outputs,
        depth,
        linear.width,
        linear.eps,
        NORM=linear.is_normed,
        GATED=linear.is_gated,
        SECOND=linear.is_gated or linear.is_split,
        ROWS=ROWS,
        COLS=columns,
        DEPTH=DEPTH // 2 if is_fp32 and not linear.is_split else DEPTH,
        PARTS=depth // 16 if linear.is_normed else 0,
        PRECISION="tf32" if linear.is_split else "tf32x3" if is_fp32 else "ieee",
        BESIDE=is_beside,
        LINES=triton.next_power_of_2(depth // per_line) if is_chained else 0,  # else one program for all depths
        PER_LINE=per_line,
        IS_PADDED=given.shape[1] == depth,
        num_warps=4,
        num_stages=FP32_STAGES if is_fp32 else STAGES[columns],
        **chained(is_chained),
    )
