"""A linear layer with what stands around it: the norm before, gate, bias and residual after.

A program makes ROWS x COLS outputs and runs over the whole input width itself, in one order of summation. What a row
gives does therefore not depend on how many rows there are, nor on the width of a tile: batches of any size give the
same bits.

The norm's gain is part of the weight, and its factor, one number a row, is applied to the sums: normalised inputs are
never written.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

DEPTH = 64  # inputs of a step of the sum; widths are padded to multiples of it
ROWS = 64  # the smallest tile of the matrix units that sum in the way of the large ones
# Outputs of a program -> steps in flight. Wide programs read less twice, narrow ones are many: both keep a device busy.
STAGES = {16: 6, 32: 5, 64: 4, 128: 4}
ENOUGH_PROGRAMS = 96  # nearly one for each multiprocessor of a large device
# In fp32 a tile takes twice the memory, and its products three times the registers.
FP32_COLUMNS, FP32_STAGES = 32, 3
FEW_ROWS, SPLIT_COLUMNS = 64, 16


@triton.jit(do_not_specialize=["num_rows", "width"])  # a program for one row more must not be another program
def _linear(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_columns,
    depth,
    width,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inner = tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    weight_at = weight_ptr + columns[None, :].to(tl.int64) * depth + inner[:, None]
    to_second = num_columns.to(tl.int64) * depth  # the second half of a gated or a split weight
    total = tl.zeros([ROWS, COLS], tl.float32)
    values = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for _ in range(0, depth, DEPTH):
        x = tl.load(x_at, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        if NORM:
            squares += tl.sum(x * x, axis=1)
        if SPLIT:
            high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            rest = tl.load(weight_at + to_second, mask=is_column[None, :], other=0.0)
            total = tl.dot(x - high, weight, total, input_precision=PRECISION)
            total = tl.dot(high, rest, total, input_precision=PRECISION)
            total = tl.dot(high, weight, total, input_precision=PRECISION)
        else:
            total = tl.dot(x.to(weight.dtype), weight, total, input_precision=PRECISION)
        if GATED:
            weight = tl.load(weight_at + to_second, mask=is_column[None, :], other=0.0)
            values = tl.dot(x.to(weight.dtype), weight, values, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if NORM:
        factor = 1.0 / tl.sqrt(squares / width + eps)
        total *= factor[:, None]
        values *= factor[:, None]
    if GATED:
        total = total * tl.sigmoid(total) * values
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0)[None, :]
    at = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A weight as the kernel reads it: [N, depth], or [2 N, depth] with gates before values, or split (`split`).

    `depth` is the input width padded to a multiple of DEPTH with zeros; `is_normed`: the input is normalised first,
    over its `width`, and the gain is part of the weight. Inputs that are normalised are fp32: such a tile goes through
    registers to the matrix units, which it must. In shared memory it would be read by two, and the compiler (3.6) then
    lets the next tile overwrite it while the matrix units still read it.
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


def split(weight: Tensor) -> Tensor:
    """[N, depth] fp32 -> [2 N, depth]: what TF32 holds of it, then the rest. Three products keep fp32's digits."""
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
    x: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    columns: int | None = None,
) -> None:
    """x [B, depth] -> out [B, >= N], which may be `residual`, and has its row stride.

    x has zeros beyond the width. `columns` of a tile change no bit; None: chosen here.
    """
    num_rows, depth = x.shape[0], linear.weight.shape[1]
    is_fp32 = linear.weight.dtype == torch.float32
    columns = columns or tile_columns(linear, num_rows)
    _linear[(triton.cdiv(linear.num_outputs, columns), triton.cdiv(num_rows, ROWS))](
        x,
        x.stride(0),
        linear.weight,
        linear.bias,
        residual,
        out,
        out.stride(0),
        num_rows,
        linear.num_outputs,
        depth,
        linear.width,
        linear.eps,
        NORM=linear.is_normed,
        GATED=linear.is_gated,
        SPLIT=linear.is_split,
        ROWS=ROWS,
        COLS=columns,
        DEPTH=DEPTH // 2 if is_fp32 and not linear.is_split else DEPTH,
        PRECISION="tf32" if linear.is_split else "tf32x3" if is_fp32 else "ieee",
        num_warps=4,
        num_stages=FP32_STAGES if is_fp32 else STAGES[columns],
    )
