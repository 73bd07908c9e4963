"""The backward kernels of the keyed scan, in the order in which they run."""

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
    store_scalars,
)


@triton.jit(do_not_specialize=LENGTHS)
def correction_gradient_kernel(
    q, k, log_decay, d_out, d_corrections, num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_corrections [tokens,H,V]: the part that comes from the reads of the same chunk."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length = locate(chunk, num_tokens, chunks_per_row)
    total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
    queries, keys = load_rows(q, first, length, h, H, 0, K, K), load_rows(k, first, length, h, H, 0, K, K)
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay_between(total)
    grad = load_rows(d_out, first, length, h, H, 0, V, V)
    found = tl.dot(tl.trans(weights).to(q.dtype.element_ty), grad, input_precision=PRECISION)
    store_rows(d_corrections, found, first, length, h, H, 0, V, V)


@triton.jit(do_not_specialize=LENGTHS)
def state_walk_backward_kernel(
    q, k, log_decay, of_state, d_out, d_final, reset, d_corrections, d_states, d_state, num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, RESET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: d_states, the gradients of the states after each chunk; d_corrections whole."""
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    column = tl.program_id(1) * BLOCK
    operand = k.dtype.element_ty
    grad = tl.load(d_final + matrix_offsets(row * H + h, column, K, V, BLOCK))
    for back in range(chunks_per_row):
        chunk = row * chunks_per_row + chunks_per_row - 1 - back
        first, length = locate(chunk, num_tokens, chunks_per_row)
        after = grad.to(operand)
        tl.store(d_states + matrix_offsets(chunk * H + h, column, K, V, BLOCK), after)
        total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
        end = last_of(total)
        late = (load_rows(k, first, length, h, H, 0, K, K) * tl.exp(end - total)[:, None]).to(operand)
        change = load_rows(d_corrections, first, length, h, H, column, V, BLOCK).to(tl.float32)
        change = (change + tl.dot(late, after, input_precision=PRECISION)).to(operand)
        store_rows(d_corrections, change, first, length, h, H, column, V, BLOCK)
        queries = (load_rows(q, first, length, h, H, 0, K, K) * tl.exp(total)[:, None]).to(operand)
        grad = grad * tl.exp(end)
        wanted = load_rows(d_out, first, length, h, H, column, V, BLOCK)
        grad += tl.dot(tl.trans(queries), wanted, input_precision=PRECISION)
        gone = load_rows(of_state, first, length, h, H, 0, K, K)
        grad -= tl.dot(tl.trans(gone), change, input_precision=PRECISION)
        if RESET:
            grad = tl.where(tl.load(reset + chunk) != 0, 0.0, grad)
    tl.store(d_state + matrix_offsets(row * H + h, column, K, V, BLOCK), grad)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_read_backward_kernel(
    q, k, log_decay, states, corrections, d_out, d_corrections, d_states, d_q, d_k, d_of_state, d_total,
    num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_q whole; of d_k [tokens,H,K] fp32 and d_total [tokens,H] what does not come from the triangular system."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length = locate(chunk, num_tokens, chunks_per_row)
    operand = q.dtype.element_ty
    total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
    end = last_of(total)
    offsets = matrix_offsets(chunk * H + h, 0, K, V, V)
    held, after = tl.load(states + offsets), tl.load(d_states + offsets)
    # what the decay of the whole chunk leaves of the state
    whole = tl.exp(end) * tl.sum(tl.sum(held.to(tl.float32) * after.to(tl.float32), axis=1), axis=0)
    grad = load_rows(d_out, first, length, h, H, 0, V, V)
    from_state = tl.dot(grad, tl.trans(held), input_precision=PRECISION) * tl.exp(total)[:, None]
    gone = tl.dot(load_rows(d_corrections, first, length, h, H, 0, V, V), tl.trans(held), input_precision=PRECISION)
    store_rows(d_of_state, -gone, first, length, h, H, 0, K, K)
    change = load_rows(corrections, first, length, h, H, 0, V, V)
    late = tl.dot(change, tl.trans(after), input_precision=PRECISION) * tl.exp(end - total)[:, None]
    queries, keys = load_rows(q, first, length, h, H, 0, K, K), load_rows(k, first, length, h, H, 0, K, K)
    to_end = tl.sum(late * keys, axis=1)
    d_g = tl.sum(from_state * queries, axis=1) - to_end
    whole += tl.sum(to_end, axis=0)
    d_weights = tl.dot(grad, tl.trans(change), input_precision=PRECISION) * decay_between(total)
    both = d_weights * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    d_g += tl.sum(both, axis=1) - tl.sum(both, axis=0)
    d_g += tl.where(tl.arange(0, CHUNK) == CHUNK - 1, whole, 0.0)
    # past the row's last token nothing decays: what belongs to the chunk's end belongs to its last token
    last = tl.minimum(length, CHUNK) - 1
    d_g = tl.where(tl.arange(0, CHUNK) == last, tl.sum(tl.where(tl.arange(0, CHUNK) >= last, d_g, 0.0)), d_g)
    store_scalars(d_total, d_g, first, length, h, H)
    d_weights = d_weights.to(operand)
    store_rows(d_q, from_state + tl.dot(d_weights, keys, input_precision=PRECISION), first, length, h, H, 0, K, K)
    late += tl.dot(tl.trans(d_weights), queries, input_precision=PRECISION)
    store_rows(d_k, late, first, length, h, H, 0, K, K)


@triton.jit(do_not_specialize=LENGTHS)
def chunk_solve_backward_kernel(
    k, v, strength, log_decay, inverse, d_own, d_of_state, d_total, d_k_part, d_k, d_v, d_strength, d_log_decay,
    num_tokens, chunks_per_row,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Through the triangular system: d_k, d_v, d_strength and d_log_decay whole."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, length = locate(chunk, num_tokens, chunks_per_row)
    operand = k.dtype.element_ty
    b = load_scalars(strength, first, length, h, H)
    total = tl.cumsum(load_scalars(log_decay, first, length, h, H), axis=0)
    solved = tl.trans(tl.load(inverse + matrix_offsets(chunk * H + h, 0, CHUNK, CHUNK, CHUNK)))
    values, grad = load_rows(v, first, length, h, H, 0, V, V), load_rows(d_own, first, length, h, H, 0, V, V)
    d_values = tl.dot(solved, grad, input_precision=PRECISION)
    store_rows(d_v, d_values * b[:, None], first, length, h, H, 0, V, V)
    d_b = tl.sum(d_values * values, axis=1)
    d_inverse = tl.dot(grad, tl.trans((values * b[:, None]).to(operand)), input_precision=PRECISION)
    keys, grad = load_rows(k, first, length, h, H, 0, K, K), load_rows(d_of_state, first, length, h, H, 0, K, K)
    from_start = tl.exp(total)
    d_keys = tl.dot(solved, grad, input_precision=PRECISION) * from_start[:, None]
    along = tl.sum(d_keys * keys, axis=1)
    d_b += along
    d_g = load_scalars(d_total, first, length, h, H) + along * b
    scaled = (keys * (b * from_start)[:, None]).to(operand)
    d_inverse += tl.dot(grad, tl.trans(scaled), input_precision=PRECISION)
    d_keys = d_keys * b[:, None] + load_rows(d_k_part, first, length, h, H, 0, K, K)
    # d_A = -inverse^T d_inverse inverse^T, below the diagonal
    d_among = tl.dot(solved, d_inverse.to(operand), input_precision=PRECISION)
    d_among = -tl.dot(d_among.to(operand), solved, input_precision=PRECISION)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    d_among = tl.where(row > column, d_among * decay_between(total), 0.0)
    both = d_among * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    d_b += tl.sum(both, axis=1)
    both = both * b[:, None]
    d_g += tl.sum(both, axis=1) - tl.sum(both, axis=0)
    d_scores = (d_among * b[:, None]).to(operand)
    d_keys += tl.dot(d_scores, keys, input_precision=PRECISION)
    d_keys += tl.dot(tl.trans(d_scores), keys, input_precision=PRECISION)
    store_rows(d_k, d_keys, first, length, h, H, 0, K, K)
    store_scalars(d_strength, d_b, first, length, h, H)
    store_scalars(d_log_decay, tl.cumsum(d_g, axis=0, reverse=True), first, length, h, H)
