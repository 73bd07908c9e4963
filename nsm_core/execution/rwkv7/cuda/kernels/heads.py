"""The heads of a time mix between its products: what moves a head's matrix, the matrix token by token, and its answer.

The matrix [K, V] of a head is moved by one token after the other, whatever the length of a text: so any cut of a text
gives the same bits, and a step is a text of one token. A column of it meets the others nowhere; a program moves
COLUMNS of them and holds them in registers. nsm_core/rwkv7/time_mix.py is the specification.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, wait_for_previous
from nsm_core.rwkv7.time_mix import MAX_DECAY

# Columns of a head's matrix in one program of one warp: of many texts, or steps, as many as make whole lines of memory
COLUMNS, FEW_COLUMNS = 16, 4
UNROLL = 4  # tokens of few texts that move the matrix in a row
AHEAD = 4  # of those, or of single tokens: their vectors are on their way while others move the matrix
TOKENS = 4  # of a program before and after
SHORTEST = 1e-12  # length that a key is divided by at least, as in torch.nn.functional.normalize

# A head's vectors for a token, in the order in which they lie in memory
RECEIVED, DECAY, WRITTEN, VALUE, REMOVED, ADDED, VECTORS = range(7)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadWeights:
    """All [D] fp32."""

    removal_key: Tensor
    key_rate: Tensor
    bonus: Tensor
    gain: Tensor
    bias: Tensor
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Where receptance, key and value begin in a row of the first products; decay, rate, gate and value residual of
    the second (`residual` None: of the first layer).
    """

    received: int
    key: int
    value: int
    decay: int
    rate: int
    gate: int
    residual: int | None


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare(
    projected_ptr,
    projected_stride,
    outer_ptr,
    outer_stride,
    first_ptr,
    removal_key_ptr,
    key_rate_ptr,
    moves_ptr,
    num_tokens,
    most,
    shortest,
    RECEIVED_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    DECAY_AT: tl.constexpr,
    RATE_AT: tl.constexpr,
    RESIDUAL_AT: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    is_token = tokens < num_tokens
    own = tl.arange(0, K)[None, :]
    channels = head * K + own
    projected_ptr += tokens * projected_stride + channels
    outer_ptr += tokens * outer_stride + channels
    first_ptr += tokens * (H * K) + channels
    received = tl.load(projected_ptr + RECEIVED_AT, mask=is_token, other=0.0)
    key = tl.load(projected_ptr + KEY_AT, mask=is_token, other=0.0)
    value = tl.load(projected_ptr + VALUE_AT, mask=is_token, other=0.0)
    decay = tl.exp(-most * tl.sigmoid(tl.load(outer_ptr + DECAY_AT, mask=is_token, other=0.0)))
    rate = tl.sigmoid(tl.load(outer_ptr + RATE_AT, mask=is_token, other=0.0))
    if RESIDUAL_AT is None:
        tl.store(first_ptr, value, mask=is_token)
    else:
        share = tl.sigmoid(tl.load(outer_ptr + RESIDUAL_AT, mask=is_token, other=0.0))
        value += (tl.load(first_ptr, mask=is_token, other=0.0) - value) * share
    removed = key * tl.load(removal_key_ptr + channels)
    length = tl.sqrt(tl.sum(removed * removed, axis=1))
    removed = removed / tl.where(length < shortest, shortest, length)[:, None]  # keeps a NaN
    written = key * (1.0 + (rate - 1.0) * tl.load(key_rate_ptr + channels))
    moves_ptr += (tokens * H + head) * (6 * K) + own
    tl.store(moves_ptr, received, mask=is_token)
    tl.store(moves_ptr + K, decay, mask=is_token)
    tl.store(moves_ptr + 2 * K, written, mask=is_token)
    tl.store(moves_ptr + 3 * K, value, mask=is_token)
    tl.store(moves_ptr + 4 * K, removed, mask=is_token)
    tl.store(moves_ptr + 5 * K, removed * rate, mask=is_token)


def _scan(
    rows_ptr,
    starts_ptr,
    counts_ptr,
    moves_ptr,
    matrix_ptr,
    read_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    UNROLL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    span = tl.program_id(1)
    head = tl.program_id(0) // (K // COLUMNS)
    columns = tl.program_id(0) % (K // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    row, count = tl.load(rows_ptr + span), tl.load(counts_ptr + span)
    if row < 0:
        return
    start = tl.load(starts_ptr + span)
    keys = tl.arange(0, K)
    at = matrix_ptr + (row * H + head) * (K * K) + keys[:, None] * K + columns[None, :]
    moves_ptr += (start * H + head) * (6 * K)
    read_ptr += (start * H + head) * K + columns
    matrix = tl.load(at)
    for token in tl.range(0, count.to(tl.int32), num_stages=AHEAD, loop_unroll_factor=UNROLL):
        move = moves_ptr + token * (H * 6 * K)
        received, decay, written = tl.load(move + keys), tl.load(move + K + keys), tl.load(move + 2 * K + keys)
        value = tl.load(move + 3 * K + columns)
        removed, added = tl.load(move + 4 * K + keys), tl.load(move + 5 * K + keys)
        found = tl.sum(matrix * removed[:, None], axis=0)
        matrix = tl.fma(-added[:, None], found[None, :], matrix * decay[:, None])
        matrix = tl.fma(written[:, None], value[None, :], matrix)
        tl.store(read_ptr + token * (H * K), tl.sum(matrix * received[:, None], axis=0))
    tl.store(at, matrix)


# Where the compiler does not know how the matrix lies in memory, a thread holds one column of it, and not four: a token
# takes half the time, and of a whole device three times as much. Sums run over the same keys in the same order.
_scan_few = triton.jit(_scan, do_not_specialize_on_alignment=["matrix_ptr"])
_scan = triton.jit(_scan)


@triton.jit(do_not_specialize=["num_tokens"])
def _answer(
    read_ptr,
    moves_ptr,
    gate_ptr,
    gate_stride,
    gain_ptr,
    bias_ptr,
    bonus_ptr,
    out_ptr,
    num_tokens,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_previous(CHAINED)
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    is_token = tokens < num_tokens
    own = tl.arange(0, K)[None, :]
    channels = head * K + own
    read = tl.load(read_ptr + tokens * (H * K) + channels, mask=is_token, other=0.0)
    moves_ptr += (tokens * H + head) * (6 * K) + own
    received = tl.load(moves_ptr, mask=is_token, other=0.0)
    written = tl.load(moves_ptr + 2 * K, mask=is_token, other=0.0)
    value = tl.load(moves_ptr + 3 * K, mask=is_token, other=0.0)
    centred = read - (tl.sum(read, axis=1) / K)[:, None]
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / K + eps)
    normed = centred * factor[:, None] * tl.load(gain_ptr + channels) + tl.load(bias_ptr + channels)
    bonus = tl.sum(received * written * tl.load(bonus_ptr + channels), axis=1)
    gate = tl.load(gate_ptr + tokens * gate_stride + channels, mask=is_token, other=0.0)
    out = (normed + bonus[:, None] * value) * gate
    tl.store(out_ptr + tokens * (H * K) + channels, out.to(out_ptr.dtype.element_ty), mask=is_token)


def prepare(
    weights: HeadWeights,
    at: Columns,
    *,
    projected: Tensor,
    outer: Tensor,
    first: Tensor,
    moves: Tensor,
    is_chained: bool,
) -> None:
    """projected and outer: of the products, fp32; first [T, D]: the first layer's values, written by it.

    moves [T, H, VECTORS, K]: what moves each head's matrix.
    """
    num_tokens, heads, _, size = moves.shape
    _prepare[(triton.cdiv(num_tokens, TOKENS), heads)](
        *(projected, projected.stride(0), outer, outer.stride(0), first, weights.removal_key, weights.key_rate),
        *(moves, num_tokens, MAX_DECAY, SHORTEST),
        RECEIVED_AT=at.received,
        KEY_AT=at.key,
        VALUE_AT=at.value,
        DECAY_AT=at.decay,
        RATE_AT=at.rate,
        RESIDUAL_AT=at.residual,
        H=heads,
        K=size,
        TOKENS=TOKENS,
        num_warps=1,
        **chained(is_chained),
    )


def scan(
    *,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    moves: Tensor,
    matrix: Tensor,
    read: Tensor,
    has_few_texts: bool,
    is_chained: bool,
) -> None:
    """Pieces of text, rows [S] of the pool (negative: none), their first tokens and numbers of tokens [S], int64.

    matrix [rows of the pool, H, K, V] fp32 is moved in place; read [T, D] fp32: what each token reads of it.
    `has_few_texts`: more programs share a matrix. Either way gives the same bits.
    """
    heads, size = moves.shape[1], moves.shape[3]
    columns = FEW_COLUMNS if has_few_texts else COLUMNS
    kernel: Any = _scan_few if has_few_texts else _scan
    kernel[(heads * (size // columns), len(rows))](
        *(rows, starts, counts, moves, matrix, read),
        H=heads,
        K=size,
        COLUMNS=columns,
        AHEAD=AHEAD,
        UNROLL=UNROLL if has_few_texts else 1,
        num_warps=1,
        enable_fp_fusion=False,  # the two kernels have the same bits
        **chained(is_chained),
    )


def answer(
    weights: HeadWeights, at: Columns, *, read: Tensor, moves: Tensor, outer: Tensor, out: Tensor, is_chained: bool
) -> None:
    """read [T, D] -> out [T, D] in the dtype of the products: normalised by heads, with the bonus, gated."""
    num_tokens, heads, _, size = moves.shape
    gate = outer[:, at.gate :]
    _answer[(triton.cdiv(num_tokens, TOKENS), heads)](
        *(read, moves, gate, gate.stride(0), weights.gain, weights.bias, weights.bonus, out, num_tokens, weights.eps),
        H=heads,
        K=size,
        TOKENS=TOKENS,
        num_warps=1,
        **chained(is_chained),
    )
