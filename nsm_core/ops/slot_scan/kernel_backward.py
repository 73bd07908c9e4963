"""Backward kernels: the gradients of the chunk states, the scan over chunks in reverse, the gradients of the tokens, by
bank.

Names: `d_x` is the gradient of x. With L the logits, r the read weights, w the write weights and G the running sum of
the log decays, every use of G is as exp(G_i - G_j), so its gradient is that of each factor times the factor:
`dG = L dL + r dr - w dw` (plus the end of the chunk), and that of the log decays is the reverse running sum.

The first kernel keeps r and dL, both in the dtype of the products: to compute them again in the third would take its
registers, and more time than reading them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsm_core.ops.slot_scan.kernel_common import (
    bank_offsets,
    decay_factors,
    decay_to_end,
    load_active,
    load_log_decay,
    load_tokens,
    locate_chunk,
    match_bank,
    near_mask,
    read_softmax,
    store_tokens,
    token_weights,
    write_weight,
)


@triton.jit
def chunk_read_backward_kernel(
    q,
    k,
    v,
    log_decay,
    scale,
    read_bias,
    active,
    chunk_table,
    states,
    d_out,
    read_weights,
    d_logits,
    d_log_decay,
    d_scale,
    d_read_bias,
    d_states,
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
    """Softmax backward: `read_weights`, `d_logits`, what L dL + r dr gives to `d_log_decay`, and `d_states`, the
    gradient of the state at each chunk's start through the chunk's own outputs."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    operand = q.dtype.element_ty
    g = load_log_decay(log_decay, active, 0, first, length, row, active_stride, h, H, M, M, ACTIVE)
    left, right, far_left, far_right, from_start = decay_factors(g)
    right *= write_weight(g)
    near_write, far_write = right.to(operand), (right * far_right).to(operand)

    banks = bank_offsets(chunk, h, H, M, K, M)
    queries, keys = load_tokens(q, first, length, h, H, K, K), load_tokens(k, first, length, h, H, K, K)
    bank = tl.load(states + banks).to(operand)
    logits = match_bank(queries, keys, bank, left, near_write, far_write, far_left, from_start, PRECISION)
    read = read_softmax(logits, scale, read_bias, active, first, length, row, active_stride, h, H, M, BIAS, ACTIVE)
    store_tokens(read_weights, read, first, length, h, H, M, M)

    d_outputs = load_tokens(d_out, first, length, h, H, K, K).to(operand)
    values = load_tokens(v, first, length, h, H, K, K)
    bank = tl.load(states + K + banks).to(operand)
    d_read = match_bank(d_outputs, values, bank, left, near_write, far_write, far_left, from_start, PRECISION)
    weights = tl.trans((read * (left * from_start)).to(operand))
    tl.store(d_states + K + banks, tl.dot(weights, d_outputs, input_precision=PRECISION))

    d_scaled = read * (d_read - tl.sum(read * d_read, axis=1)[:, None])
    tl.store(d_scale + tl.program_id(0), tl.sum(tl.sum(d_scaled * logits, axis=1), axis=0))
    if BIAS:
        store_tokens(d_read_bias, d_scaled, first, length, h, H, M, M)
    d_scaled *= tl.load(scale + h)
    store_tokens(d_logits, d_scaled, first, length, h, H, M, M)
    d_total = tl.cumsum(d_scaled * logits + read * d_read, axis=0, reverse=True)
    store_tokens(d_log_decay, d_total, first, length, h, H, M, M)
    weights = tl.trans((d_scaled * (left * from_start)).to(operand))
    tl.store(d_states + banks, tl.dot(weights, queries, input_precision=PRECISION))


@triton.jit
def chunk_scan_backward_kernel(
    d_states,
    decays,
    d_final,
    d_state,
    reset,
    d_initial,
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
    """Replaces each chunk's own gradient of its start state in `d_states` by the whole gradient of its end state.

    Writes the gradient of the row's first state to `d_state`, that of the state which resets put in its place to
    `d_initial` [rows,H,M,2K].
    """
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    first_chunk, num_chunks = row * chunks_per_row, chunks_per_row
    if RAGGED:
        first_chunk = tl.load(row_chunks + row)
        num_chunks = tl.load(row_chunks + row + 1) - first_chunk
    slots = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = slots[:, None] * (2 * K) + tl.arange(0, 2 * K)[None, :]
    carried = tl.load(d_final + tl.program_id(0).to(tl.int64) * (M * 2 * K) + tile)
    restarted = tl.zeros_like(carried)
    for back in tl.range(0, num_chunks, num_stages=STAGES):
        n = num_chunks - 1 - back
        base = ((first_chunk + n).to(tl.int64) * H + h) * M
        own = tl.load(d_states + base * (2 * K) + tile)
        decay = tl.load(decays + base + slots)
        tl.store(d_states + base * (2 * K) + tile, carried)
        carried = decay[:, None] * carried + own
        if RESET:
            starts = tl.load(reset + row * chunks_per_row + n) != 0
            restarted += tl.where(starts, carried, 0.0)
            carried = tl.where(starts, 0.0, carried)
    tl.store(d_state + tl.program_id(0).to(tl.int64) * (M * 2 * K) + tile, carried)
    if RESET:
        tl.store(d_initial + tl.program_id(0).to(tl.int64) * (M * 2 * K) + tile, restarted)


@triton.jit
def chunk_bank_backward_kernel(
    x,
    y,
    weights,
    log_decay,
    active,
    chunk_table,
    states,
    d_states,
    d_x,
    d_y,
    d_log_decay,
    num_tokens,
    chunks_per_row,
    active_stride,
    H,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    RAGGED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one bank, which is written with y: q and keys with dL as `weights`, or d_out and values with r.

    Writes d_y, and d_x of the queries; adds to `d_log_decay`. `d_states` now holds the gradient of the state at each
    chunk's end. One bank and BLOCK slots at a time: the registers hold no more.
    """
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    left_tokens, right_tokens = load_tokens(x, first, length, h, H, K, K), load_tokens(y, first, length, h, H, K, K)
    operand = y.dtype.element_ty
    left_tokens = left_tokens.to(operand)
    scores = tl.dot(right_tokens, tl.trans(left_tokens), input_precision=PRECISION)  # [j,i]
    near_scores = tl.where(tl.trans(near_mask()), scores, 0.0).to(operand)
    mixing = tl.zeros_like(scores)
    scores = scores.to(operand)
    d_left = tl.zeros_like(left_tokens).to(tl.float32)
    d_right = tl.zeros_like(d_left)

    for slot in tl.range(0, M, BLOCK, num_stages=1):
        g = load_log_decay(log_decay, active, slot, first, length, row, active_stride, h, H, M, BLOCK, ACTIVE)
        left, right, far_left, far_right, from_start = decay_factors(g)
        w = write_weight(g)
        near_write, far_write = (w * right).to(operand), (w * right * far_right).to(operand)
        banks = bank_offsets(chunk, h, H, M, K, BLOCK) + slot * (2 * K)
        if VALUES:
            banks += K

        # through the chunk's end: token i decays the chunk's start and the writes of tokens before i
        bank, d_bank = tl.load(states + banks), tl.load(d_states + banks)
        carried = tl.exp(tl.sum(g, axis=0)) * tl.sum(d_bank * bank, axis=1)
        d_bank = d_bank.to(operand)
        end_decay = decay_to_end(g)
        d_right = tl.dot((w * end_decay).to(operand), d_bank, d_right, input_precision=PRECISION)
        d_end = end_decay * tl.dot(right_tokens, tl.trans(d_bank), input_precision=PRECISION)
        d_decay = tl.cumsum(w * d_end, axis=0) - d_end + carried[None, :]

        # within the chunk: the gradient of token i's G counts for the decays of all tokens up to i
        reads = load_tokens(weights + slot, first, length, h, H, M, BLOCK).to(tl.float32) * left
        if not VALUES:
            start = (reads * from_start).to(operand)
            d_left = tl.dot(start, bank.to(operand), d_left, input_precision=PRECISION)
        near_read, far_read = reads.to(operand), (reads * far_left).to(operand)
        mixing += token_weights(near_read, far_read, near_write, far_write, PRECISION)
        d_write = far_right * tl.dot(scores, far_read, input_precision=PRECISION)
        d_write = right * tl.dot(near_scores, near_read, d_write, input_precision=PRECISION)
        d_decay -= tl.cumsum(w * d_write, axis=0, reverse=True) + (1.0 - w) * d_write

        d_decay += load_tokens(d_log_decay + slot, first, length, h, H, M, BLOCK)
        if ACTIVE:
            d_decay = tl.where(load_active(active + slot, row, active_stride, h, M, BLOCK), d_decay, 0.0)
        store_tokens(d_log_decay + slot, d_decay, first, length, h, H, M, BLOCK)

    mixing = mixing.to(operand)
    d_right = tl.dot(tl.trans(mixing), left_tokens, d_right, input_precision=PRECISION)
    store_tokens(d_y, d_right, first, length, h, H, K, K)
    if not VALUES:
        d_left = tl.dot(mixing, right_tokens, d_left, input_precision=PRECISION)
        store_tokens(d_x, d_left, first, length, h, H, K, K)
