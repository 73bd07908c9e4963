"""What the kernels of the keyed scan share. One program works on CHUNK tokens of one head.

Rows are padded to whole chunks by masks: a token that is none has strength, log decay, key and value of zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsm_core.ops.slot_scan import chunked

CHUNK = tl.constexpr(chunked.CHUNK_LEN)
# Not built anew for 1 and multiples of 16: a walk over one chunk, unrolled, read shared memory out of bounds.
LENGTHS = ("num_tokens", "chunks_per_row")


@triton.jit
def locate(chunk, num_tokens, chunks_per_row):
    """First token of the chunk in the flattened batch (int64), and how many tokens of its row follow from there on."""
    row = chunk // chunks_per_row
    offset = (chunk % chunks_per_row) * CHUNK
    return row.to(tl.int64) * num_tokens + offset, num_tokens - offset


@triton.jit
def load_rows(x, first, length, h, H, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK,BLOCK] of a [tokens,H,WIDTH] tensor from `column` on, zero past the row's tokens."""
    token, lane = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(x + (first * H + h) * WIDTH + column + token * (H * WIDTH) + lane, mask=token < length, other=0.0)


@triton.jit
def store_rows(x, values, first, length, h, H, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token, lane = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    pointers = x + (first * H + h) * WIDTH + column + token * (H * WIDTH) + lane
    tl.store(pointers, values.to(x.dtype.element_ty), mask=token < length)


@triton.jit
def load_scalars(x, first, length, h, H):
    """[CHUNK] of a [tokens,H] tensor, zero past the row's tokens."""
    token = tl.arange(0, CHUNK)
    return tl.load(x + (first + token) * H + h, mask=token < length, other=0.0)


@triton.jit
def store_scalars(x, values, first, length, h, H):
    token = tl.arange(0, CHUNK)
    tl.store(x + (first + token) * H + h, values, mask=token < length)


@triton.jit
def matrix_offsets(index, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [ROWS,BLOCK] of matrix number `index` in a tensor of [ROWS,COLUMNS] matrices, from `column` on."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    return index.to(tl.int64) * (ROWS * COLUMNS) + row * COLUMNS + column + lane


@triton.jit
def decay_between(total):
    """[CHUNK,CHUNK]: exp(G_i - G_j) for j <= i, else 0; `total` [CHUNK] is G."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.where(i >= j, tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def last_of(total):
    """G at the chunk's end, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, total, 0.0))
