"""The forward kernels of the keyed scan: each chunk's triangular system, the walk over chunks, the reads."""

from __future__ import annotations

import triton
import triton.language as tl

from nsm_core.ops.keyed_scan.kernel_common import (
    CHUNK,
    LENGTHS,
    decay_between,
    last_of,
    load_rows,
    load_scalars,
    locate,
    matrix_offsets,
    store_rows,
)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_solve_kernel(
    k, v, strength, log_decay, inverse, of_state, own, num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inverse = (I + A)^-1 [chunks,H,C,C]; own = inverse (b v) [tokens,H,V], of_state = inverse (b exp(G) k)."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length = locate(chunk, num_tokens, chunks_per_row)
    keys = load_rows(k, first, length, h, H, 0, K, K)
    b = load_scalars(strength, first, length, h, H)
    total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # A transposed: rows of A are summed along the axis that rows of the inverse lie on
    among = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    among = tl.where(row < column, among * b[None, :] * tl.trans(decay_between(total)), 0.0)
    solved = tl.where(row == column, 1.0, 0.0)
    for i in range(1, CHUNK):
        weights = tl.sum(tl.where(column == i, among, 0.0), axis=1)
        change = tl.sum(weights[:, None] * solved, axis=0)
        solved = tl.where(row == i, solved - change[None, :], solved)
    solved = solved.to(k.dtype.element_ty)
    tl.store(inverse + matrix_offsets(chunk * H + h, 0, CHUNK, CHUNK, CHUNK), solved)
    keys = (keys * (b * tl.exp(total))[:, None]).to(k.dtype.element_ty)
    store_rows(of_state, tl.dot(solved, keys, input_precision=PRECISION), first, length, h, H, 0, K, K)
    values = (load_rows(v, first, length, h, H, 0, V, V) * b[:, None]).to(k.dtype.element_ty)
    store_rows(own, tl.dot(solved, values, input_precision=PRECISION), first, length, h, H, 0, V, V)


@triton.jit(do_not_specialize=LENGTHS)
def state_walk_kernel(
    k, log_decay, of_state, own, state, reset, states, corrections, final, num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, RESET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk, BLOCK columns of one head's state: states before each chunk, corrections, the last state."""
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    column = tl.program_id(1) * BLOCK
    operand = k.dtype.element_ty
    held = tl.load(state + matrix_offsets(row * H + h, column, K, V, BLOCK))
    for n in range(chunks_per_row):
        chunk = row * chunks_per_row + n
        if RESET:
            held = tl.where(tl.load(reset + chunk) != 0, 0.0, held)
        first, length = locate(chunk, num_tokens, chunks_per_row)
        before = held.to(operand)
        tl.store(states + matrix_offsets(chunk * H + h, column, K, V, BLOCK), before)
        change = load_rows(own, first, length, h, H, column, V, BLOCK).to(tl.float32)
        change -= tl.dot(load_rows(of_state, first, length, h, H, 0, K, K), before, input_precision=PRECISION)
        change = change.to(operand)
        store_rows(corrections, change, first, length, h, H, column, V, BLOCK)
        total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
        end = last_of(total)
        late = (load_rows(k, first, length, h, H, 0, K, K) * tl.exp(end - total)[:, None]).to(operand)
        held = held * tl.exp(end) + tl.dot(tl.trans(late), change, input_precision=PRECISION)
    tl.store(final + matrix_offsets(row * H + h, column, K, V, BLOCK), held)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_read_kernel(
    q, k, log_decay, states, corrections, out, num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length = locate(chunk, num_tokens, chunks_per_row)
    total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
    queries = load_rows(q, first, length, h, H, 0, K, K)
    held = tl.load(states + matrix_offsets(chunk * H + h, 0, K, V, V))
    read = tl.dot(queries, held, input_precision=PRECISION) * tl.exp(total)[:, None]
    keys = load_rows(k, first, length, h, H, 0, K, K)
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay_between(total)
    change = load_rows(corrections, first, length, h, H, 0, V, V)
    read += tl.dot(weights.to(q.dtype.element_ty), change, input_precision=PRECISION)
    store_rows(out, read, first, length, h, H, 0, V, V)
