"""Attention of a prompt's tokens over a window, for inference: keys are read in one order, whatever is read with them.

A program makes QUERIES outputs of one head. It goes through the keys that one of them may see KEYS at a time, from the
oldest on; what a query may not see changes nothing, to the bit. So a token's output depends neither on other rows, nor
on padding, nor on where its prompt was cut, as long as it was cut at multiples of KEYS.

Around it, in one pass each: queries, keys and values from the projection, and the ring that the next tokens read.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 64, 64
TOKENS = 32  # of a program that makes queries and keys, or copies them
TURN = 2 * math.pi


@triton.jit(do_not_specialize=["num_tokens"])
def _read_window(
    projected_ptr,
    positions_ptr,
    ring_ptr,
    turns_ptr,
    log_scale_ptr,
    q_ptr,
    kv_ptr,
    num_tokens,
    turn,
    eps,
    P: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    K: tl.constexpr = 2 * HALF
    part, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, LANES)
    is_lane = (lanes < HALF)[None, :]
    own = part - H  # of keys and values: keys of all heads, then values
    kv_ptr += ((row * KV + own % KV) * 2 + own // KV) * (WINDOW + num_tokens) * K
    if tl.program_id(0) < (WINDOW + TOKENS - 1) // TOKENS:  # the ring, its oldest token first
        entries = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        mask = (entries < WINDOW)[:, None] & is_lane & (part >= H)
        start = tl.load(positions_ptr + row * num_tokens)
        source = ((row * KV + own % KV) * 2 + own // KV) * (WINDOW * K) + ((entries + start) % WINDOW)[:, None] * K
        to = entries[:, None] * K + lanes[None, :]
        for half in tl.static_range(2):
            held = tl.load(ring_ptr + source + half * HALF + lanes[None, :], mask=mask, other=0.0)
            tl.store(kv_ptr + to + half * HALF, held.to(kv_ptr.dtype.element_ty), mask=mask)
        return
    tokens = (tl.program_id(0) - (WINDOW + TOKENS - 1) // TOKENS) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & is_lane
    at = projected_ptr + (row * num_tokens + tokens)[:, None] * P + part * K + lanes[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if part < H + KV:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        factor = (1.0 / tl.sqrt(squares / K + eps))[:, None]
        # whole turns leave in fp64: of a position of a million an fp32 angle would be off by a twentieth of a radian
        position = tl.load(positions_ptr + row * num_tokens + tokens, mask=is_token, other=0).to(tl.float64)
        turns = position[:, None] * tl.load(turns_ptr + lanes, mask=lanes < HALF, other=0.0)[None, :]
        angles = (turns - tl.floor(turns)).to(tl.float32) * turn
        cos, sin = tl.cos(angles), tl.sin(angles)
        before = first * factor
        after = second * factor
        first = before * cos - after * sin
        second = after * cos + before * sin
    if part < H:
        scale = tl.exp(tl.load(log_scale_ptr + part)) / tl.sqrt(K * 1.0)
        to = q_ptr + ((row * num_tokens + tokens)[:, None] * H + part) * K + lanes[None, :]
        tl.store(to, (first * scale).to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(to + HALF, (second * scale).to(q_ptr.dtype.element_ty), mask=mask)
    else:
        to = kv_ptr + (WINDOW + tokens)[:, None] * K + lanes[None, :]
        tl.store(to, first.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(to + HALF, second.to(kv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _keep_ring(
    kv_ptr,
    positions_ptr,
    lengths_ptr,
    ring_ptr,
    num_tokens,
    K: tl.constexpr,
    KV: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    part, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entries = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, CHANNELS)
    mask = (entries < WINDOW)[:, None] & (channels < K)[None, :]
    length = num_tokens
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row).to(tl.int32)
    end = ((tl.load(positions_ptr + row * num_tokens) + length) % WINDOW).to(tl.int32)
    source = (entries + WINDOW - end) % WINDOW + length  # the oldest of the last WINDOW tokens is at `length`
    kv_ptr += (row * (2 * KV) + part) * (WINDOW + num_tokens) * K
    held = tl.load(kv_ptr + source[:, None] * K + channels[None, :], mask=mask, other=0.0)
    to = (row * (2 * KV) + part) * (WINDOW * K) + entries[:, None] * K + channels[None, :]
    tl.store(ring_ptr + to, held.to(ring_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _attend(
    q_ptr,
    kv_ptr,
    positions_ptr,
    out_ptr,
    num_tokens,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * QUERIES
    queries, channels = start + tl.arange(0, QUERIES), tl.arange(0, CHANNELS)
    is_query, is_channel = queries < num_tokens, channels < K
    at = ((row * num_tokens + queries)[:, None] * H + head) * K + channels[None, :]
    is_input = is_query[:, None] & is_channel[None, :]
    q = tl.load(q_ptr + at, mask=is_input, other=0.0)
    positions = tl.load(positions_ptr + row * num_tokens + queries, mask=is_query, other=0)
    furthest = tl.minimum(positions, WINDOW).to(tl.int32)  # positions count from the start of the text
    num_keys = WINDOW + num_tokens
    kv_ptr += (row * (H // GROUP) + head // GROUP) * 2 * num_keys * K
    top = tl.full([QUERIES], -1e30, tl.float32)  # finite: a difference of two infinities is no number
    total = tl.zeros([QUERIES], tl.float32)
    read = tl.zeros([QUERIES, CHANNELS], tl.float32)
    for first in range(start, tl.minimum(start + QUERIES + WINDOW, num_keys), KEYS):
        keys = first + tl.arange(0, KEYS)
        distance = (WINDOW + queries)[:, None] - keys[None, :]
        is_seen = (distance >= 0) & (distance <= furthest[:, None]) & is_query[:, None] & (keys < num_keys)[None, :]
        if tl.max(tl.max(is_seen.to(tl.int32), axis=1), axis=0) > 0:
            token = keys[:, None] * K + channels[None, :]
            is_value = (keys < num_keys)[:, None] & is_channel[None, :]
            k = tl.load(kv_ptr + token, mask=is_value, other=0.0)
            scores = tl.where(is_seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_top[:, None])
            rescale = tl.exp(top - new_top)
            v = tl.load(kv_ptr + num_keys * K + token, mask=is_value, other=0.0)
            read = read * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            total = total * rescale + tl.sum(weights, axis=1)
            top = new_top
    out = (read / tl.where(is_query, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=is_input)


def read_window(
    projected: Tensor, positions: Tensor, ring: Tensor, *, turns: Tensor, log_scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """projected [B,T,P]: queries, keys, values; positions [B,T] int64; ring [B,Hkv,2,W,K]; turns [K/2] fp64 of each
    pair a token; log_scale [H] fp32.

    Returns q [B,T,H,K], scaled, and the keys and values [B,Hkv,2,W+T,K] of the ring and the tokens, oldest first;
    queries and keys of tokens are normed and rotated.
    """
    batch, num_tokens, width = projected.shape
    _, kv_heads, _, window, head_dim = ring.shape
    heads = log_scale.shape[0]
    q = projected.new_empty(batch, num_tokens, heads, head_dim)
    kv = projected.new_empty(batch, kv_heads, 2, window + num_tokens, head_dim)
    tiles = triton.cdiv(window, TOKENS) + triton.cdiv(num_tokens, TOKENS)
    with torch.cuda.device_of(projected):
        _read_window[(tiles, heads + 2 * kv_heads, batch)](
            projected,
            positions,
            ring,
            turns,
            log_scale,
            q,
            kv,
            num_tokens,
            TURN,
            eps,
            P=width,
            H=heads,
            KV=kv_heads,
            HALF=head_dim // 2,
            LANES=max(2, triton.next_power_of_2(head_dim // 2)),
            WINDOW=window,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return q, kv


def keep_ring(kv: Tensor, positions: Tensor, lengths: Tensor | None, ring: Tensor) -> Tensor:
    """kv [B,Hkv,2,W+T,K] as `read_window` makes it; the ring after `lengths` [B] of the tokens, in the dtype of the one
    before.
    """
    batch, kv_heads, _, window, head_dim = ring.shape
    new_ring = torch.empty_like(ring)
    with torch.cuda.device_of(kv):
        _keep_ring[(triton.cdiv(window, TOKENS), 2 * kv_heads, batch)](
            kv,
            positions,
            lengths,
            new_ring,
            kv.shape[3] - window,
            K=head_dim,
            KV=kv_heads,
            CHANNELS=max(16, triton.next_power_of_2(head_dim)),
            WINDOW=window,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return new_ring


def attend_in_order(q: Tensor, kv: Tensor, positions: Tensor, window: int) -> Tensor:
    """q [B,T,H,K], kv [B,Hkv,2,W+T,K], positions [B,T] -> [B,T,H K]: each token over itself and the W before it."""
    batch, num_tokens, heads, head_dim = q.shape
    out = torch.empty_like(q)
    with torch.cuda.device_of(q):
        _attend[(triton.cdiv(num_tokens, QUERIES), heads, batch)](
            q,
            kv,
            positions,
            out,
            num_tokens,
            H=heads,
            GROUP=heads // kv.shape[1],
            K=head_dim,
            CHANNELS=max(16, triton.next_power_of_2(head_dim)),
            WINDOW=window,
            QUERIES=QUERIES,
            KEYS=KEYS,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
            num_warps=4,
            num_stages=2,
        )
    return out.flatten(2)
