"""What a prompt's tokens need between the products of a block, each in one pass: the residual sum with the norm behind
it, and the gate of the feed-forward layer.

A token's numbers depend on that token alone: a program's tile has the same shape whatever the batch is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # tokens of a program: one for each warp
GATE_ROWS, GATE_COLUMNS = 4, 512


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    x_ptr,
    change_ptr,
    gain_ptr,
    sum_ptr,
    full_ptr,
    low_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_channel = channels < D
    mask = (rows < num_rows)[:, None] & is_channel[None, :]
    at = rows[:, None].to(tl.int64) * D + channels[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if change_ptr is not None:
        x += tl.load(change_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_ptr + at, x, mask=mask)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    normed = x * factor[:, None] * tl.load(gain_ptr + channels, mask=is_channel, other=0.0)[None, :]
    if full_ptr is not None:
        tl.store(full_ptr + at, normed, mask=mask)
    tl.store(low_ptr + at, normed.to(low_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate(up_ptr, out_ptr, num_rows, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    at = rows[:, None].to(tl.int64) * (2 * HIDDEN) + columns[None, :]
    gate = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(up_ptr + HIDDEN + at, mask=mask, other=0.0).to(tl.float32)
    to = rows[:, None].to(tl.int64) * HIDDEN + columns[None, :]
    tl.store(out_ptr + to, (gate * tl.sigmoid(gate) * value).to(out_ptr.dtype.element_ty), mask=mask)


def norm_rows(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, *, has_full: bool) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [..., d] fp32: in fp32 if `has_full`, and in `dtype`."""
    low = torch.empty_like(x, dtype=dtype)
    full = torch.empty_like(x) if has_full and dtype != x.dtype else None
    _launch(x, None, gain, None, full, low, eps)
    return (low if full is None else full), low


def add_norm_rows(x: Tensor, change: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., d] fp32 and `change` [..., d] -> their sum in fp32, and its RMSNorm in `dtype`."""
    total, low = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _launch(x, change, gain, total, None, low, eps)
    return total, low


def _launch(
    x: Tensor, change: Tensor | None, gain: Tensor, total: Tensor | None, full: Tensor | None, low: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    with torch.cuda.device_of(x):
        _add_norm[(triton.cdiv(num_rows, ROWS),)](
            x,
            change,
            gain,
            total,
            full,
            low,
            num_rows,
            eps,
            D=width,
            WIDTH=max(16, triton.next_power_of_2(width)),
            ROWS=ROWS,
            num_warps=4,
        )


def gate_rows(up: Tensor) -> Tensor:
    """up [..., 2h], gates then values -> [..., h] in the same dtype: silu(gate) * value."""
    hidden = up.shape[-1] // 2
    out = up.new_empty(*up.shape[:-1], hidden)
    num_rows = up.numel() // (2 * hidden)
    with torch.cuda.device_of(up):
        _gate[(triton.cdiv(hidden, GATE_COLUMNS), triton.cdiv(num_rows, GATE_ROWS))](
            up, out, num_rows, HIDDEN=hidden, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=4
        )
    return out
