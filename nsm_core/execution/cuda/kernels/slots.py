"""A slot-memory layer between its two projections, for one token a row, as one kernel (docs/model.md, equations 1-6).

A program handles one head of one row. It reads the head's slots once, moves them towards the token's key and value,
reads them through the softmax, and writes them back in place.
"""

from __future__ import annotations

import dataclasses
import math

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, prefetch, wait_for_previous
from nsm_core.ops.routing.kernel import distribution, kth_largest_after, softplus
from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN

NUM_WARPS = 2  # for 64 slots of 64 dimensions; in proportion for others
LARGEST_WRITE = -math.expm1(LOG_DECAY_MIN)


@triton.jit
def _mix(x_ptr, tail_ptr, weight_ptr, channels, is_channel, C: tl.constexpr, TAPS: tl.constexpr):
    """[K]: SiLU of the convolution at this token."""
    x = tl.load(x_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    mixed = tl.load(weight_ptr + (TAPS - 1) * C + channels, mask=is_channel, other=0.0) * x
    for tap in tl.static_range(TAPS - 1):
        weight = tl.load(weight_ptr + tap * C + channels, mask=is_channel, other=0.0)
        mixed += weight * tl.load(tail_ptr + tap * C + channels, mask=is_channel, other=0.0)
    return mixed * tl.sigmoid(mixed)


@triton.jit
def _shift(x_ptr, tail_ptr, own, is_channel, D: tl.constexpr, TAPS: tl.constexpr):
    """The token becomes the last of the tail, for a head's channels of q, k and v.

    A value may be held by several threads: all of them have read a place before it is written.
    """
    C: tl.constexpr = 3 * D
    tl.debug_barrier()
    for tap in tl.static_range(TAPS - 2):
        later_ptr = tail_ptr + (tap + 1) * C + own
        q = tl.load(later_ptr, mask=is_channel, other=0.0)
        k = tl.load(later_ptr + D, mask=is_channel, other=0.0)
        v = tl.load(later_ptr + 2 * D, mask=is_channel, other=0.0)
        tl.debug_barrier()
        tl.store(later_ptr - C, q, mask=is_channel)
        tl.store(later_ptr - C + D, k, mask=is_channel)
        tl.store(later_ptr - C + 2 * D, v, mask=is_channel)
    last_ptr = tail_ptr + (TAPS - 2) * C + own
    for part in tl.static_range(3):
        x = tl.load(x_ptr + part * D + own, mask=is_channel, other=0.0).to(tl.float32)
        tl.store(last_ptr + part * D, x, mask=is_channel)


@triton.jit
def _normed(x, eps, K: tl.constexpr):
    return x / tl.sqrt(tl.sum(x * x, axis=0) / K + eps)


@triton.jit
def _writes(
    router_ptr,
    bias_ptr,
    timescale_ptr,
    head,
    taper,
    floor,
    largest,
    H: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """[SLOTS]: the fraction of each slot that the token replaces. TOP_K 0: a sigmoid for each slot by itself."""
    slots = tl.arange(0, SLOTS)
    is_slot = slots < M
    logits = tl.load(router_ptr + head * M + slots, mask=is_slot, other=-float("inf"))
    if TOP_K == 0:
        write = tl.sigmoid(logits)
        write = tl.where(write > largest, largest, write)  # keeps a NaN
    else:
        strength = softplus(tl.load(router_ptr + H * M + head))
        timescale = tl.exp(tl.load(timescale_ptr + head * M + slots, mask=is_slot, other=0.0))
        scores = logits + tl.load(bias_ptr + head * M + slots, mask=is_slot, other=0.0)
        rows = tl.reshape(logits, [1, SLOTS])
        row_scores = tl.reshape(scores, [1, SLOTS])
        threshold = tl.max(rows, axis=1)
        if TOP_K < M:
            threshold = kth_largest_after(row_scores, TOP_K)
        routing = tl.reshape(distribution(rows, row_scores, threshold, taper, TOP_K < M), [SLOTS])
        raw = -timescale * strength * routing
        write = 1.0 - tl.exp(tl.where(raw < floor, floor, raw))
    return write


@triton.jit
def _slot_step(
    rows_ptr,
    projected_ptr,
    projected_stride,
    router_ptr,
    router_stride,
    conv_ptr,
    scale_ptr,
    gain_ptr,
    bias_ptr,
    timescale_ptr,
    tail_ptr,
    slots_ptr,
    out_ptr,
    out_stride,
    eps,
    taper,
    floor,
    largest,
    H: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    LINES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    D: tl.constexpr = H * K
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row < 0:
        wait_for_previous(CHAINED)
        return
    slots, in_head = tl.arange(0, SLOTS), tl.arange(0, CHANNELS)
    is_channel = in_head < K
    mask = (slots < M)[:, None] & is_channel[None, :]
    row_ptr = slots_ptr + (row * H + head) * (M * 2 * K)
    at = row_ptr + slots[:, None] * (2 * K) + in_head[None, :]
    # the bytes that take the time: asked for first, and first to leave the cache, where the weights should stay
    keys = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if CHAINED:
        prefetch(row_ptr + K + tl.minimum(slots, M - 1)[:, None] * (2 * K) + 32 * tl.arange(0, LINES)[None, :])
    wait_for_previous(CHAINED)
    x_ptr = projected_ptr + index * projected_stride
    tail_ptr += row * ((TAPS - 1) * 3 * D)
    own = head * K + in_head
    q = _normed(_mix(x_ptr, tail_ptr, conv_ptr, own, is_channel, 3 * D, TAPS), eps, K)
    k = _normed(_mix(x_ptr, tail_ptr, conv_ptr, D + own, is_channel, 3 * D, TAPS), eps, K)
    v = _mix(x_ptr, tail_ptr, conv_ptr, 2 * D + own, is_channel, 3 * D, TAPS)
    write = _writes(
        router_ptr + index * router_stride,
        bias_ptr,
        timescale_ptr,
        head,
        taper,
        floor,
        largest,
        H,
        M,
        TOP_K,
        SLOTS,
    )
    keys += write[:, None] * (k[None, :] - keys)
    tl.store(at, keys, mask=mask, eviction_policy="evict_first")
    logits = tl.load(scale_ptr + head) * tl.sum(keys * q[None, :], axis=1)
    logits = tl.where(slots < M, logits, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    # only now, when the keys need no registers any more: more programs find room, and wait for memory in turn
    values = tl.load(at + K, mask=mask, other=0.0, eviction_policy="evict_first")
    values += write[:, None] * (v[None, :] - values)
    tl.store(at + K, values, mask=mask, eviction_policy="evict_first")
    read = _normed(tl.sum(weights[:, None] * values, axis=0), eps, K)
    gate = tl.load(x_ptr + 3 * D + own, mask=is_channel, other=0.0).to(tl.float32)
    read = read * tl.load(gain_ptr + own, mask=is_channel, other=0.0) * gate * tl.sigmoid(gate)
    tl.store(out_ptr + index * out_stride + own, read.to(out_ptr.dtype.element_ty), mask=is_channel)
    _shift(x_ptr, tail_ptr, own, is_channel, D, TAPS)


@dataclasses.dataclass(frozen=True, slots=True)
class SlotWeights:
    """What the kernel reads besides the states. conv [taps,3d]; scale [H]; gain [d]; all fp32.

    bias and timescale [H,M] belong to the softmax router, `top_k` is 0 for the sigmoid.
    """

    conv: Tensor
    scale: Tensor
    gain: Tensor
    bias: Tensor | None
    timescale: Tensor | None
    top_k: int
    taper: float
    eps: float


def slot_step_in_place(
    weights: SlotWeights,
    *,
    rows: Tensor,
    projected: Tensor,
    router: Tensor,
    tail: Tensor,
    slots: Tensor,
    out: Tensor,
    is_chained: bool,
) -> None:
    """rows [B] int64; projected [B, >= 4d]: q, k, v and the gate; router [B, >= H M (+ H)] fp32: logits and strengths.

    tail [rows of the pool, taps-1, 3d] and slots [rows of the pool, H, M, 2K], fp32, are moved on by the token; out
    [B, >= d] is the input of the output projection.
    """
    _, heads, num_slots, pair = slots.shape
    block_slots, channels = triton.next_power_of_2(num_slots), triton.next_power_of_2(pair // 2)
    _slot_step[(heads, rows.shape[0])](
        rows,
        projected,
        projected.stride(0),
        router,
        router.stride(0),
        weights.conv,
        weights.scale,
        weights.gain,
        weights.bias,
        weights.timescale,
        tail,
        slots,
        out,
        out.stride(0),
        weights.eps,
        weights.taper,
        LOG_DECAY_MIN,
        LARGEST_WRITE,
        H=heads,
        M=num_slots,
        K=pair // 2,
        TAPS=weights.conv.shape[0],
        TOP_K=weights.top_k,
        SLOTS=block_slots,
        CHANNELS=channels,
        LINES=max(1, channels // 32),
        num_warps=max(1, NUM_WARPS * block_slots * channels // 4096),
        **chained(is_chained),
    )
