"""Backward kernels: the gradients of the chunk states, the scan over chunks in reverse, the gradients of the tokens.

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
    """Softmax backward: `read_weights`, `d_logits`, the part L dL + r dr of dG (in `d_log_decay`), and `d_states`, the
    gradient of the state at each chunk's start through the chunk's own outputs."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    operand = q.dtype.element_ty
    g = load_log_decay(log_decay, active, first, length, row, active_stride, h, H, M, ACTIVE)
    left, right, far_left, far_right, from_start = decay_factors(g)
    right *= write_weight(g)
    near_write, far_write = right.to(operand), (right * far_right).to(operand)

    banks = bank_offsets(chunk, h, H, M, K)
    queries, keys = load_tokens(q, first, length, h, H, K), load_tokens(k, first, length, h, H, K)
    bank = tl.load(states + banks).to(operand)
    logits = match_bank(queries, keys, bank, left, near_write, far_write, far_left, from_start, PRECISION)
    read = read_softmax(logits, scale, read_bias, active, first, length, row, active_stride, h, H, M, BIAS, ACTIVE)
    store_tokens(read_weights, read, first, length, h, H, M)

    d_outputs = load_tokens(d_out, first, length, h, H, K).to(operand)
    values = load_tokens(v, first, length, h, H, K)
    bank = tl.load(states + K + banks).to(operand)
    d_read = match_bank(d_outputs, values, bank, left, near_write, far_write, far_left, from_start, PRECISION)
    weights = tl.trans((read * (left * from_start)).to(operand))
    tl.store(d_states + K + banks, tl.dot(weights, d_outputs, input_precision=PRECISION))

    d_scaled = read * (d_read - tl.sum(read * d_read, axis=1)[:, None])
    tl.store(d_scale + tl.program_id(0), tl.sum(tl.sum(d_scaled * logits, axis=1), axis=0))
    if BIAS:
        store_tokens(d_read_bias, d_scaled, first, length, h, H, M)
    d_scaled *= tl.load(scale + h)
    store_tokens(d_logits, d_scaled, first, length, h, H, M)
    store_tokens(d_log_decay, d_scaled * logits + read * d_read, first, length, h, H, M)
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
def bank_backward(x, y, weights, left, near_write, far_write, far_left, to_end, d_bank, PRECISION: tl.constexpr):
    """Gradients of one bank, written with y and matched with x: keys with q and dL, values with d_out and r.

    `weights` [CHUNK,M] is dL or r, `to_end` the write weights as of the chunk's end, `d_bank` its gradient there.
    Returns the weights between tokens, d_y, and d_w: `near` and `far` of the pairs in the chunk, `end` through its end.
    """
    near_read = weights.to(tl.float32) * left
    near_read, far_read = near_read.to(x.dtype), (near_read * far_left).to(x.dtype)
    mixing = token_weights(near_read, far_read, near_write, far_write, PRECISION).to(x.dtype)
    d_y = tl.dot(tl.trans(mixing), x, input_precision=PRECISION)
    d_y += tl.dot(to_end, d_bank, input_precision=PRECISION)
    end = tl.dot(y, tl.trans(d_bank), input_precision=PRECISION)
    scores = tl.dot(y, tl.trans(x), input_precision=PRECISION)  # transposed: [j,i]
    far = tl.dot(scores.to(x.dtype), far_read, input_precision=PRECISION)
    scores = tl.where(tl.trans(near_mask()), scores, 0.0).to(x.dtype)
    near = tl.dot(scores, near_read, input_precision=PRECISION)
    return mixing, d_y, near, far, end


@triton.jit
def chunk_token_backward_kernel(
    q,
    k,
    v,
    log_decay,
    active,
    chunk_table,
    states,
    d_states,
    d_out,
    read_weights,
    d_logits,
    d_q,
    d_k,
    d_v,
    d_log_decay,
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
    """d_q, d_k, d_v and all of d_log_decay; `d_states` now holds the gradient of the state at each chunk's end."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length, row = locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED)
    operand = q.dtype.element_ty
    g = load_log_decay(log_decay, active, first, length, row, active_stride, h, H, M, ACTIVE)
    left, right, far_left, far_right, from_start = decay_factors(g)
    w, total = write_weight(g), tl.sum(g, axis=0)
    near_write, far_write = (w * right).to(operand), (w * right * far_right).to(operand)
    decay_to_end = tl.exp(total[None, :] - tl.cumsum(g, axis=0))
    to_end = (w * decay_to_end).to(operand)
    banks = bank_offsets(chunk, h, H, M, K)

    queries, keys = load_tokens(q, first, length, h, H, K), load_tokens(k, first, length, h, H, K)
    weights = load_tokens(d_logits, first, length, h, H, M)
    d_bank, bank = tl.load(d_states + banks), tl.load(states + banks)
    kept = tl.sum(d_bank * bank, axis=1)
    mixing, d_keys, near, far, end = bank_backward(
        queries, keys, weights, left, near_write, far_write, far_left, to_end, d_bank.to(operand), PRECISION
    )
    store_tokens(d_k, d_keys, first, length, h, H, K)
    from_start = (weights.to(tl.float32) * (left * from_start)).to(operand)
    d_queries = tl.dot(from_start, bank.to(operand), input_precision=PRECISION)
    d_queries += tl.dot(mixing, keys, input_precision=PRECISION)
    store_tokens(d_q, d_queries, first, length, h, H, K)

    d_outputs = load_tokens(d_out, first, length, h, H, K).to(operand)
    values, weights = load_tokens(v, first, length, h, H, K), load_tokens(read_weights, first, length, h, H, M)
    d_bank = tl.load(d_states + K + banks)
    kept += tl.sum(d_bank * tl.load(states + K + banks), axis=1)
    _, d_values, near_v, far_v, end_v = bank_backward(
        d_outputs, values, weights, left, near_write, far_write, far_left, to_end, d_bank.to(operand), PRECISION
    )
    store_tokens(d_v, d_values, first, length, h, H, K)

    # dG of token i counts for the decays of all tokens up to i. Through the chunk's end, token i decays what the chunk
    # started with and what tokens before i wrote.
    d_inside = right * (near + near_v + far_right * (far + far_v))
    d_end = decay_to_end * (end + end_v)
    d_total = load_tokens(d_log_decay, first, length, h, H, M) - w * d_inside
    d_decay = tl.cumsum(d_total, axis=0, reverse=True) - (1.0 - w) * d_inside
    d_decay += tl.cumsum(w * d_end, axis=0) - d_end + (tl.exp(total) * kept)[None, :]
    if ACTIVE:
        d_decay = tl.where(load_active(active, row, active_stride, h, M), d_decay, 0.0)
    store_tokens(d_log_decay, d_decay, first, length, h, H, M)
