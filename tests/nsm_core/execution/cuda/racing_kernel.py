"""Compiles a kernel whose tile is read by threads and by the matrix units; exits with 1 unless that is found."""

from __future__ import annotations

import sys

import triton
import triton.language as tl

from benchmarks import decode_builds


@triton.jit
def _racing(x_ptr, weight_ptr, out_ptr, COLS: tl.constexpr, CHAINED: tl.constexpr):
    rows, columns, inner = tl.arange(0, 64), tl.arange(0, COLS), tl.arange(0, 64)
    total, squares = tl.zeros([64, COLS], tl.float32), tl.zeros([64], tl.float32)
    for step in range(8):
        x = tl.load(x_ptr + rows[:, None] * 512 + step * 64 + inner[None, :])
        weight = tl.load(weight_ptr + columns[None, :] * 512 + step * 64 + inner[:, None])
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        total = tl.dot(x, weight, total)
    tl.store(out_ptr + rows[:, None] * COLS + columns[None, :], total * squares[:, None])


if __name__ == "__main__":
    types: dict[str, str | None] = {"x_ptr": "*bf16", "weight_ptr": "*bf16"}
    is_fine = decode_builds.build("racing", _racing, types, {"COLS": 32}, num_warps=4, num_stages=5)
    sys.exit(1 if is_fine else 0)
