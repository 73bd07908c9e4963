"""A layer of keyed slots between its two projections, for one token a row, as one kernel (ops/keyed_scan/reference.py).

A program handles one head of one row. It reads the head's slots once, removes what they hold for the token's key, adds
its value, reads them by its query, and writes them back in place: some columns at a time, while the next ones are on
their way. So it needs few registers, and several programs share a multiprocessor: some wait for memory, others write.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.execution.cuda.kernels.chain import chained, wait_for_previous
from nsm_core.ops.routing.kernel import softplus

COLUMNS_AT_A_TIME = 32
NUMBERS_A_WARP = 1024  # of these columns, in registers: 32 for each thread, and as many on their way
SHORTEST = 1e-12  # length that a route is divided by at least, as in torch.nn.functional.normalize


@triton.jit
def _convolve(
    x_ptr, tail_ptr, weight_ptr, channels, weights, is_channel, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr
):
    """The convolution at this token. `channels` of the token and the tail [taps-1, C], `weights` of [taps, W]."""
    x = tl.load(x_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    mixed = tl.load(weight_ptr + (TAPS - 1) * W + weights, mask=is_channel, other=0.0) * x
    for tap in tl.static_range(TAPS - 1):
        weight = tl.load(weight_ptr + tap * W + weights, mask=is_channel, other=0.0)
        mixed += weight * tl.load(tail_ptr + tap * C + channels, mask=is_channel, other=0.0)
    return mixed


@triton.jit
def _unit(x, shortest):
    length = tl.sqrt(tl.sum(x * x, axis=0))
    return x / tl.where(length < shortest, shortest, length)  # keeps a NaN


@triton.jit
def _shift(x_ptr, tail_ptr, channels, is_channel, C: tl.constexpr, TAPS: tl.constexpr):
    """The token becomes the last of the tail. All threads have read a place before it is written."""
    tl.debug_barrier()
    for tap in tl.static_range(TAPS - 2):
        later = tl.load(tail_ptr + (tap + 1) * C + channels, mask=is_channel, other=0.0)
        tl.debug_barrier()
        tl.store(tail_ptr + tap * C + channels, later, mask=is_channel)
    x = tl.load(x_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(tail_ptr + (TAPS - 2) * C + channels, x, mask=is_channel)


@triton.jit
def _keyed_step(
    rows_ptr,
    projected_ptr,
    projected_stride,
    rates_ptr,
    rates_stride,
    read_taps_ptr,
    write_taps_ptr,
    value_taps_ptr,
    gain_ptr,
    skip_ptr,
    tail_ptr,
    slots_ptr,
    out_ptr,
    out_stride,
    eps,
    shortest,
    H: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    C: tl.constexpr = H * (M + V)
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row < 0:
        wait_for_previous(CHAINED)
        return
    slots, columns = tl.arange(0, SLOTS), tl.arange(0, COLUMNS)
    is_slot = slots < M
    at = slots_ptr + (row * H + head) * (M * V) + slots[:, None] * V + columns[None, :]
    # the bytes that take the time: asked for first, and first to leave the cache, where the weights should stay
    held = tl.load(at, mask=is_slot[:, None] & (columns < V)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_previous(CHAINED)
    x_ptr = projected_ptr + index * projected_stride
    tail_ptr += row * ((TAPS - 1) * C)
    route = head * M + slots
    key = _unit(_convolve(x_ptr, tail_ptr, write_taps_ptr, route, route, is_slot, C, H * M, TAPS), shortest)
    query = _unit(_convolve(x_ptr, tail_ptr, read_taps_ptr, route, route, is_slot, C, H * M, TAPS), shortest)
    rates_ptr += index * rates_stride + head
    strength, decay = tl.sigmoid(tl.load(rates_ptr)), tl.exp(-softplus(tl.load(rates_ptr + H)))
    parts = tl.arange(0, PARTS)[:, None]
    reads = tl.zeros([PARTS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        here = part * COLUMNS + columns
        if part + 1 < PARTS:
            is_next = is_slot[:, None] & (here + COLUMNS < V)[None, :]
            later = tl.load(at + (part + 1) * COLUMNS, mask=is_next, other=0.0, eviction_policy="evict_first")
        own = head * V + here
        value = _convolve(x_ptr, tail_ptr, value_taps_ptr, H * M + own, own, here < V, C, H * V, TAPS)
        held *= decay
        change = strength * (value - tl.sum(key[:, None] * held, axis=0))
        held += key[:, None] * change[None, :]
        to = is_slot[:, None] & (here < V)[None, :]
        tl.store(at + part * COLUMNS, held, mask=to, eviction_policy="evict_first")
        reads = tl.where(parts == part, tl.sum(query[:, None] * held, axis=0)[None, :], reads)
        if part + 1 < PARTS:
            held = later
    inner = parts * COLUMNS + columns[None, :]
    own, is_column = head * V + inner, inner < V
    read = reads / tl.sqrt(tl.sum(tl.sum(reads * reads, axis=1), axis=0) / V + eps)
    read = read * tl.load(gain_ptr + own, mask=is_column, other=0.0)
    value = _convolve(x_ptr, tail_ptr, value_taps_ptr, H * M + own, own, is_column, C, H * V, TAPS)
    read += value * tl.load(skip_ptr + own, mask=is_column, other=0.0)
    gate = tl.load(x_ptr + C + own, mask=is_column, other=0.0).to(tl.float32)
    read = read * gate * tl.sigmoid(gate)
    tl.store(out_ptr + index * out_stride + own, read.to(out_ptr.dtype.element_ty), mask=is_column)
    _shift(x_ptr, tail_ptr, route, is_slot, C, TAPS)
    _shift(x_ptr, tail_ptr, H * M + own, is_column, C, TAPS)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyedWeights:
    """What the kernel reads besides the states, all fp32: taps of routes that are read and written [taps, H M], of
    values [taps, H V]; gain and skip [H V].
    """

    read_taps: Tensor
    write_taps: Tensor
    value_taps: Tensor
    gain: Tensor
    skip: Tensor
    eps: float


def keyed_step_in_place(
    weights: KeyedWeights,
    *,
    rows: Tensor,
    projected: Tensor,
    rates: Tensor,
    tail: Tensor,
    slots: Tensor,
    out: Tensor,
    is_chained: bool,
) -> None:
    """rows [B] int64; projected [B, >= H (M + 2 V)]: routes, values and the gate; rates [B, >= 2 H] fp32: strengths and
    decays, before their activation.

    tail [rows of the pool, taps-1, H (M + V)] and slots [rows of the pool, H, M, V], fp32, are moved on by the token;
    out [B, >= H V] is the input of the output projection.
    """
    _, heads, num_slots, width = slots.shape
    block_slots, all_columns = triton.next_power_of_2(num_slots), triton.next_power_of_2(width)
    columns = min(COLUMNS_AT_A_TIME, all_columns)
    _keyed_step[(heads, rows.shape[0])](
        rows,
        projected,
        projected.stride(0),
        rates,
        rates.stride(0),
        weights.read_taps,
        weights.write_taps,
        weights.value_taps,
        weights.gain,
        weights.skip,
        tail,
        slots,
        out,
        out.stride(0),
        weights.eps,
        SHORTEST,
        H=heads,
        M=num_slots,
        V=width,
        TAPS=weights.value_taps.shape[0],
        SLOTS=block_slots,
        COLUMNS=columns,
        PARTS=all_columns // columns,
        num_warps=max(1, block_slots * columns // NUMBERS_A_WARP),
        **chained(is_chained),
    )
