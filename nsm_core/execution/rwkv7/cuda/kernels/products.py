"""Products of tokens with several matrices as one kernel: each matrix has its own inputs and its own activation.

A program makes ROWS x COLS outputs and runs over the whole width of its inputs, in one order of summation. So what a
token gives depends neither on other tokens, nor on their number, nor on the width of a tile.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import LINE, chained, prefetch, wait_for_previous

DEPTH = 64  # inputs of a step of the sum; widths are padded to multiples of it
ROWS = 64  # the smallest tile of the matrix units that sum in the way of the large ones
PART = 128  # the outputs of a matrix begin at multiples of it: the widest tile lies in one matrix
UNIT = 16  # outputs that share an entry of the table: the narrowest tile
# Outputs of a program -> steps in flight. Wide programs read less twice, narrow ones are many: both keep a device busy.
STAGES = {16: 6, 32: 5, 64: 4, 128: 4}
ENOUGH_PROGRAMS = 96  # nearly one for each multiprocessor of a large device
FP32_COLUMNS, FP32_STAGES = 32, 3  # a tile takes twice the memory, and its products three times the registers

INPUT, WEIGHT, WIDTH, COLUMNS, ACTIVATION, IS_INNER, FIELDS = range(7)


class Activation(enum.IntEnum):
    """What is made of a sum."""

    NONE = 0
    TANH = 1
    SIGMOID = 2
    SQUARED_RELU = 3


@triton.jit
def _activated(x, activation):
    if activation == 1:
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    if activation == 2:
        x = tl.sigmoid(x)
    if activation == 3:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit(do_not_specialize=["num_tokens"])  # a program for one token more must not be another program
def _products(
    x_ptr,
    x_stride,
    weight_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    inner_ptr,
    out_stride,
    num_tokens,
    ADDED: tl.constexpr,
    FIELDS: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own = tl.arange(0, COLS)
    inner = tl.arange(0, DEPTH)
    entry = table_ptr + tl.program_id(0) * (COLS // UNIT) * FIELDS
    input_at = tl.multiple_of(tl.load(entry), 16)
    weight_ptr += tl.multiple_of(tl.load(entry + 1), 64)
    width, num_columns = tl.load(entry + 2), tl.load(entry + 3)
    activation, is_inner = tl.load(entry + 4), tl.load(entry + 5)
    depth = tl.multiple_of((width + 63) // 64 * 64, 64)
    is_token, is_column = tokens < num_tokens, own < num_columns
    if CHAINED and tl.num_programs(1) == 1:  # with more rows, as many programs would ask for the same
        lines = tl.minimum(tl.arange(0, LINES) * PER_LINE, depth - 1)
        rows = tl.minimum(own, tl.maximum(num_columns, 1) - 1)
        prefetch(weight_ptr + rows[:, None].to(tl.int64) * depth + lines[None, :])
    wait_for_previous(CHAINED)
    x_at = x_ptr + tokens[:, None].to(tl.int64) * x_stride + input_at + inner[None, :]
    weight_at = weight_ptr + own[None, :].to(tl.int64) * depth + inner[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):
        is_input = is_token[:, None]
        if not IS_PADDED:  # memory behind it is another input's
            is_input = is_input & (start + inner < width)[None, :]
        x = tl.load(x_at, mask=is_input, other=0.0)
        weight = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    columns = tl.program_id(0) * COLS + own
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0)[None, :]
    total = _activated(total, activation)
    at = tokens[:, None].to(tl.int64) * out_stride + columns[None, :]
    mask = is_token[:, None] & is_column[None, :]
    if ADDED:
        total += tl.load(out_ptr + at, mask=mask, other=0.0)
    if inner_ptr is not None:
        tl.store(inner_ptr + at, total.to(inner_ptr.dtype.element_ty), mask=mask & (is_inner != 0))
    if out_ptr is not None:
        tl.store(out_ptr + at, total, mask=mask & (is_inner == 0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One matrix [N, width]: its inputs begin at the number `input_at` of a token's row; `bias` [N].

    `is_inner`: its outputs are inputs of further products, in their dtype; else they are fp32.
    """

    weight: Tensor
    input_at: int = 0
    bias: Tensor | None = None
    activation: Activation = Activation.NONE
    is_inner: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Products:
    """Matrices as the kernel reads them, one after the other, each row padded to a multiple of DEPTH with zeros.

    table [columns / UNIT, FIELDS] int64; bias [columns] fp32, 0 where a part has none; `starts`: the first output of
    each part, a multiple of PART; `depth`: the widest part's.
    """

    weight: Tensor
    table: Tensor
    bias: Tensor | None
    starts: tuple[int, ...]
    num_columns: int
    depth: int
    is_padded: bool

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


def pack_products(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Products:
    """Copies of the parts' matrices, in `dtype`."""
    table: list[list[int]] = []
    starts: list[int] = []
    weight_at, packed, biases = 0, [], []
    for part in parts:
        rows, width = part.weight.shape
        depth = padded(width)
        starts.append(len(table) * UNIT)
        for first in range(0, -(-rows // PART) * PART, UNIT):
            own = [part.input_at, weight_at + first * depth, width, max(0, rows - first), part.activation]
            table.append([*own, int(part.is_inner)])
        weight_at += rows * depth
        packed.append(F.pad(part.weight.to(device=device, dtype=dtype), (0, depth - width)).flatten())
        bias = torch.zeros(rows) if part.bias is None else part.bias.float().cpu()
        biases.append(F.pad(bias, (0, -rows % PART)))
    has_bias = any(part.bias is not None for part in parts)
    return Products(
        weight=packed[0] if len(packed) == 1 else torch.cat(packed),
        table=torch.tensor(table, dtype=torch.int64, device=device),
        bias=torch.cat(biases).to(device) if has_bias else None,
        starts=tuple(starts),
        num_columns=len(table) * UNIT,
        depth=max(padded(part.weight.shape[1]) for part in parts),
        is_padded=all(part.weight.shape[1] % DEPTH == 0 for part in parts),
    )


def padded(width: int) -> int:
    """The width of a matrix's row in memory."""
    return -(-width // DEPTH) * DEPTH


def tile_columns(products: Products, num_tokens: int) -> int:
    """Outputs of a program: as many as leave enough programs."""
    if products.weight.dtype == torch.float32:
        return FP32_COLUMNS
    row_tiles = -(-num_tokens // ROWS)
    enough = [width for width in STAGES if row_tiles * (products.num_columns // width) >= ENOUGH_PROGRAMS]
    return max(enough, default=min(STAGES))


def run_products(
    products: Products,
    x: Tensor,
    *,
    out: Tensor | None = None,
    inner: Tensor | None = None,
    is_added: bool = False,
    is_chained: bool = False,
    columns: int | None = None,
) -> None:
    """x [T, ...] in the weights' dtype -> out [T, columns] fp32 and inner [T, columns], each its parts' columns.

    Of the last part's columns only those that it has are written. `is_added`: to what `out` holds. `columns` of a tile
    change no bit; None: chosen here. `is_chained`: see chain.py.
    """
    to = inner if out is None else out
    if to is None:
        raise ValueError("products need out or inner for their outputs")
    num_tokens, is_fp32 = len(x), products.weight.dtype == torch.float32
    columns = columns or tile_columns(products, num_tokens)
    per_line = LINE // products.weight.element_size()
    _products[(products.num_columns // columns, triton.cdiv(num_tokens, ROWS))](
        x,
        x.stride(0),
        products.weight,
        products.table,
        products.bias,
        out,
        inner,
        to.stride(0),
        num_tokens,
        ADDED=is_added,
        FIELDS=IS_INNER + 1,
        UNIT=UNIT,
        ROWS=ROWS,
        COLS=columns,
        DEPTH=DEPTH // 2 if is_fp32 else DEPTH,
        IS_PADDED=products.is_padded,
        PRECISION="tf32x3" if is_fp32 else "ieee",
        LINES=triton.next_power_of_2(products.depth // per_line),
        PER_LINE=per_line,
        num_warps=4,
        num_stages=FP32_STAGES if is_fp32 else STAGES[columns],
        **chained(is_chained),
    )
