"""An attention layer between its two projections, for one token a row: two kernels over the ring of keys and values.

The ring is cut into pieces of PLACES places. A program of the first kernel reads a piece of one key-value head for all
query heads that share it; the second kernel joins the pieces in their order with the token's own key and value, and
puts these into the ring. The cut is the same for every batch, so batches of any size give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, wait_for_previous

POSITIONS = 128
QUERIES = 16  # the fewest rows of a product of the matrix units
NUM_WARPS = 4


@triton.jit
def _rotated(x_ptr, cos, sin, pairs, is_pair, eps, HALF: tl.constexpr):
    """One head, normed and rotated: its two halves [HALF] fp32."""
    first = tl.load(x_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=0) / (2 * HALF) + eps)
    first, second = first * factor, second * factor
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotated_queries(
    x_ptr, cos_ptr, sin_ptr, eps, GROUP: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr
):
    """The heads of a group, normed and rotated: [QUERIES,CHANNELS] fp32, zero beyond the group and the width."""
    members, channels = tl.arange(0, QUERIES), tl.arange(0, CHANNELS)
    is_first = channels < HALF
    is_channel = channels < 2 * HALF
    mask = (members < GROUP)[:, None] & is_channel[None, :]
    at = x_ptr + members[:, None] * (2 * HALF)
    x = tl.load(at + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    other_half = tl.where(is_first, channels + HALF, channels - HALF)
    other = tl.load(at + other_half[None, :], mask=mask, other=0.0).to(tl.float32)
    pairs = tl.where(is_first, channels, channels - HALF)
    cos = tl.load(cos_ptr + pairs, mask=is_channel, other=0.0)
    sin = tl.load(sin_ptr + pairs, mask=is_channel, other=0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / (2 * HALF) + eps)
    return (x * cos[None, :] + other * tl.where(is_first, -sin, sin)[None, :]) * factor[:, None]


@triton.jit
def _read_ring(
    rows_ptr,
    start_ptr,
    projected_ptr,
    projected_stride,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    ring_ptr,
    sums_ptr,
    stats_ptr,
    window,
    num_pieces,
    eps,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    K: tl.constexpr = 2 * HALF
    piece, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + index)
    if row < 0:
        wait_for_previous(CHAINED)
        return
    start = tl.load(start_ptr + index)
    positions = piece * POSITIONS + tl.arange(0, POSITIONS)
    channels, members = tl.arange(0, CHANNELS), tl.arange(0, QUERIES)
    # before the text has filled the ring once, its first places are the ones that hold tokens
    is_seen = (positions < window) & (positions < start)
    mask = is_seen[:, None] & (channels < K)[None, :]
    at = ring_ptr + (row * (H // GROUP) + kv_head) * (2 * window * K) + positions[:, None] * K + channels[None, :]
    keys = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    values = tl.load(at + window * K, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(CHAINED)
    x_ptr = projected_ptr + index * projected_stride + kv_head * GROUP * K
    queries = _rotated_queries(
        x_ptr, cos_ptr + index * HALF, sin_ptr + index * HALF, eps, GROUP, HALF, QUERIES, CHANNELS
    )
    heads = kv_head * GROUP + members
    is_member = members < GROUP
    scale = tl.load(scale_ptr + heads, mask=is_member, other=0.0)
    scores = tl.dot(queries.to(keys.dtype), tl.trans(keys), input_precision=PRECISION) * scale[:, None]
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    largest = tl.max(scores, axis=1)
    # a piece without tokens has nothing but -inf
    weights = tl.exp(scores - tl.where(largest == -float("inf"), 0.0, largest)[:, None]).to(values.dtype)
    sums = tl.dot(weights, values, input_precision=PRECISION)
    to = (index * H + heads).to(tl.int64) * num_pieces + piece
    tl.store(stats_ptr + 2 * to, largest, mask=is_member)
    tl.store(stats_ptr + 2 * to + 1, tl.sum(weights.to(tl.float32), axis=1), mask=is_member)
    mask = is_member[:, None] & (channels < K)[None, :]
    tl.store(sums_ptr + to[:, None] * K + channels[None, :], sums, mask=mask)


@triton.jit
def _join(
    rows_ptr,
    start_ptr,
    projected_ptr,
    projected_stride,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    ring_ptr,
    sums_ptr,
    stats_ptr,
    out_ptr,
    out_stride,
    window,
    num_pieces,
    eps,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PIECES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    K: tl.constexpr = 2 * HALF
    wait_for_previous(CHAINED)
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row < 0:
        return
    kv_head = head // GROUP
    kv_heads = H // GROUP
    start = tl.load(start_ptr + index)
    pairs, pieces = tl.arange(0, PAIRS), tl.arange(0, PIECES)
    is_pair = pairs < HALF
    cos = tl.load(cos_ptr + index * HALF + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + index * HALF + pairs, mask=is_pair, other=0.0)
    x_ptr = projected_ptr + index * projected_stride
    first, second = _rotated(x_ptr + head * K, cos, sin, pairs, is_pair, eps, HALF)
    first_key, second_key = _rotated(x_ptr + (H + kv_head) * K, cos, sin, pairs, is_pair, eps, HALF)
    own_at = x_ptr + (H + kv_heads + kv_head) * K + pairs
    first_value = tl.load(own_at, mask=is_pair, other=0.0).to(tl.float32)
    second_value = tl.load(own_at + HALF, mask=is_pair, other=0.0).to(tl.float32)
    own = tl.load(scale_ptr + head) * tl.sum(first * first_key + second * second_key, axis=0)
    # pieces that no token of the text is in have a largest score of -inf
    to = (index * H + head).to(tl.int64) * num_pieces + pieces
    is_piece = pieces < num_pieces
    largest = tl.load(stats_ptr + 2 * to, mask=is_piece, other=-float("inf"))
    totals = tl.load(stats_ptr + 2 * to + 1, mask=is_piece, other=0.0)
    top = tl.maximum(tl.max(largest, axis=0), own)
    factors = tl.exp(largest - top)
    own_weight = tl.exp(own - top)
    total = tl.sum(totals * factors, axis=0) + own_weight
    mask = is_piece[:, None] & is_pair[None, :]
    sums_at = sums_ptr + to[:, None] * K + pairs[None, :]
    first_sum = tl.sum(factors[:, None] * tl.load(sums_at, mask=mask, other=0.0), axis=0)
    second_sum = tl.sum(factors[:, None] * tl.load(sums_at + HALF, mask=mask, other=0.0), axis=0)
    out_at = out_ptr + index * out_stride + head * K + pairs
    dtype = out_ptr.dtype.element_ty
    tl.store(out_at, ((first_sum + own_weight * first_value) / total).to(dtype), mask=is_pair)
    tl.store(out_at + HALF, ((second_sum + own_weight * second_value) / total).to(dtype), mask=is_pair)
    if head % GROUP == 0:
        target = ring_ptr + (row * kv_heads + kv_head) * (2 * window * K) + (start % window) * K + pairs
        held = ring_ptr.dtype.element_ty
        tl.store(target, first_key.to(held), mask=is_pair)
        tl.store(target + HALF, second_key.to(held), mask=is_pair)
        tl.store(target + window * K, first_value.to(held), mask=is_pair)
        tl.store(target + window * K + HALF, second_value.to(held), mask=is_pair)


def num_pieces(window: int) -> int:
    """Pieces that a ring is read in."""
    return -(-window // POSITIONS)


def attend_in_place(
    *,
    rows: Tensor,
    start: Tensor,
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    ring: Tensor,
    sums: Tensor,
    stats: Tensor,
    out: Tensor,
    eps: float,
    is_chained: bool,
) -> None:
    """rows, start [B] int64; projected [B, >= (H + 2 Hkv) K]: q, k, v; cos, sin [B,K/2]; scale [H].

    ring [rows of the pool, Hkv, 2, window, K] bf16, fp16 or fp32 gets the token at place start % window; queries and
    weights are rounded like it. out [B, >= H K] is the input of the output projection. sums [>= B H pieces K] and stats
    [>= 2 B H pieces] fp32: passed between the kernels.
    """
    _, kv_heads, _, window, head_dim = ring.shape
    heads, pieces = scale.shape[0], num_pieces(window)
    group, half = heads // kv_heads, head_dim // 2
    shared = (rows, start, projected, projected.stride(0), cos, sin, scale, ring, sums, stats)
    constants = {"H": heads, "GROUP": group, "HALF": half} | chained(is_chained)
    _read_ring[(pieces, kv_heads, rows.shape[0])](
        *shared,
        window,
        pieces,
        eps,
        CHANNELS=max(16, triton.next_power_of_2(head_dim)),
        QUERIES=max(QUERIES, triton.next_power_of_2(group)),
        POSITIONS=POSITIONS,
        PRECISION="tf32x3" if ring.dtype == torch.float32 else "ieee",
        num_warps=NUM_WARPS,
        **constants,
    )
    _join[(heads, rows.shape[0])](
        *shared,
        out,
        out.stride(0),
        window,
        pieces,
        eps,
        PAIRS=triton.next_power_of_2(half),
        PIECES=triton.next_power_of_2(pieces),
        num_warps=1 if pieces <= 16 else 8,
        **constants,
    )
