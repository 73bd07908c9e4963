"""Forward kernels: the update of every chunk, the scan over chunks, the outputs of every chunk.

Chunks work in parallel in the first and the third; only the second walks through a sequence, and it does no more than
one multiply-add an element, so a single long prompt fills the device too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsm_core.ops.slot_scan.kernel_common import (
    bank_offsets,
    decay_factors,
    decay_to_end,
    load_log_decay,
    load_tokens,
    locate_chunk,
    match_bank,
    read_softmax,
    store_tokens,
    token_weights,
    write_weight,
)


@triton.jit
def chunk_update_kernel(
    k,
    v,
    log_decay,
    active,
    chunk_table,
    states,
    decays,
    num_tokens,
    chunks_per_row,
    active_stride,
    H,
    M: tl.constexpr,
    K: tl.constexpr,
    RAGGED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk adds to the state by its end (`states` [chunks,H,M,2K]), and its decay (`decays` [chunks,H,M])."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    g = load_log_decay(log_decay, active, 0, first, length, row, active_stride, h, H, M, M, ACTIVE)
    weights = tl.trans((write_weight(g) * decay_to_end(g)).to(k.dtype.element_ty))

    slots = states + bank_offsets(chunk, h, H, M, K, M)
    tl.store(slots, tl.dot(weights, load_tokens(k, first, length, h, H, K, K), input_precision=PRECISION))
    tl.store(slots + K, tl.dot(weights, load_tokens(v, first, length, h, H, K, K), input_precision=PRECISION))
    tl.store(decays + (chunk.to(tl.int64) * H + h) * M + tl.arange(0, M), tl.exp(tl.sum(g, axis=0)))


@triton.jit
def chunk_scan_kernel(
    states,
    decays,
    state,
    final,
    reset,
    initial,
    row_chunks,
    chunks_per_row,
    H,
    M: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    RESET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Replaces each chunk's update in `states` by the state at its start; writes the row's last state to `final`."""
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    first_chunk, num_chunks = row * chunks_per_row, chunks_per_row
    if RAGGED:
        first_chunk = tl.load(row_chunks + row)
        num_chunks = tl.load(row_chunks + row + 1) - first_chunk
    slots = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = slots[:, None] * (2 * K) + tl.arange(0, 2 * K)[None, :]
    carried = tl.load(state + tl.program_id(0).to(tl.int64) * (M * 2 * K) + tile)
    if RESET:
        start = tl.load(initial + h * (M * 2 * K) + tile)
    for n in tl.range(0, num_chunks, num_stages=STAGES):
        base = ((first_chunk + n).to(tl.int64) * H + h) * M
        update = tl.load(states + base * (2 * K) + tile)
        decay = tl.load(decays + base + slots)
        if RESET:
            carried = tl.where(tl.load(reset + row * chunks_per_row + n) != 0, start, carried)
        tl.store(states + base * (2 * K) + tile, carried)
        carried = decay[:, None] * carried + update
    tl.store(final + tl.program_id(0).to(tl.int64) * (M * 2 * K) + tile, carried)


@triton.jit
def chunk_read_kernel(
    q,
    k,
    v,
    log_decay,
    scale,
    read_bias,
    active,
    chunk_table,
    states,
    out,
    num_tokens,
    chunks_per_row,
    active_stride,
    H,
    M: tl.constexpr,
    K: tl.constexpr,
    RAGGED: tl.constexpr,
    ACTIVE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [tokens,H,K] from the state at the start of each chunk and the chunk's own tokens."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    operand = q.dtype.element_ty
    g = load_log_decay(log_decay, active, 0, first, length, row, active_stride, h, H, M, M, ACTIVE)
    left, right, far_left, far_right, from_start = decay_factors(g)
    right *= write_weight(g)
    near_write, far_write = right.to(operand), (right * far_right).to(operand)

    slots = states + bank_offsets(chunk, h, H, M, K, M)
    queries, keys = load_tokens(q, first, length, h, H, K, K), load_tokens(k, first, length, h, H, K, K)
    bank = tl.load(slots).to(operand)
    logits = match_bank(queries, keys, bank, left, near_write, far_write, far_left, from_start, PRECISION)
    read = read_softmax(logits, scale, read_bias, active, first, length, row, active_stride, h, H, M, BIAS, ACTIVE)

    read *= left
    far_read = (read * far_left).to(operand)
    mixing = token_weights(read.to(operand), far_read, near_write, far_write, PRECISION)
    result = tl.dot(mixing.to(operand), load_tokens(v, first, length, h, H, K, K), input_precision=PRECISION)
    bank = tl.load(slots + K).to(operand)
    result += tl.dot((read * from_start).to(operand), bank, input_precision=PRECISION)
    store_tokens(out, result, first, length, h, H, K, K)
