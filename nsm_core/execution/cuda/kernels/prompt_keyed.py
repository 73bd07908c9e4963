"""A prompt's part of a layer of keyed slots, beside its products and its scan: rates, routes and values from the
projection, the tail of the convolutions, and the gated output. The same as model/keyed.py, in three passes.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.ops.routing.kernel import softplus

TOKENS = 16  # of a program
RATE_TOKENS = 64
SHORTEST = 1e-12  # length that a route is divided by at least, as in torch.nn.functional.normalize


@dataclasses.dataclass(frozen=True, slots=True)
class Taps:
    """The convolutions' weights [taps, channels] fp32 of a layer with so many heads."""

    read: Tensor
    write: Tensor
    value: Tensor
    heads: int


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _rates(
    rates_ptr,
    lengths_ptr,
    strength_ptr,
    decay_ptr,
    num_tokens,
    num_rows,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens, heads = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HEADS)
    is_token = tokens < num_rows
    is_valid = is_token
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + tokens // num_tokens, mask=is_token, other=0)
        is_valid = is_token & (tokens % num_tokens < length)
    mask = is_token[:, None] & (heads < H)[None, :]
    at = tokens[:, None] * (2 * H) + heads[None, :]
    strength = tl.sigmoid(tl.load(rates_ptr + at, mask=mask, other=0.0))
    decay = softplus(tl.load(rates_ptr + H + at, mask=mask, other=0.0))
    to = tokens[:, None] * H + heads[None, :]
    tl.store(strength_ptr + to, tl.where(is_valid[:, None], strength, 0.0), mask=mask)
    tl.store(decay_ptr + to, tl.where(is_valid[:, None], -decay, 0.0), mask=mask)


@triton.jit
def _joined(x_ptr, tail_ptr, index, num_tokens, channels, P: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr):
    """[tokens, channels] fp32 of the tail followed by the tokens of one row; zero outside."""
    is_tail = (index < TAPS - 1)[:, None]
    token = index - (TAPS - 1)
    is_token = ((token >= 0) & (token < num_tokens))[:, None]
    x = tl.load(x_ptr + token[:, None].to(tl.int64) * P + channels[None, :], mask=is_token, other=0.0)
    before = tl.load(tail_ptr + index[:, None] * C + channels[None, :], mask=is_tail, other=0.0)
    return tl.where(is_tail, before.to(x_ptr.dtype.element_ty), x).to(tl.float32)


@triton.jit
def _unit(x, shortest):
    length = tl.sqrt(tl.sum(x * x, axis=1))
    return x / tl.where(length < shortest, shortest, length)[:, None]  # keeps a NaN


@triton.jit(do_not_specialize=["num_tokens"])
def _context(
    projected_ptr,
    tail_ptr,
    lengths_ptr,
    read_taps_ptr,
    write_taps_ptr,
    value_taps_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    new_tail_ptr,
    num_tokens,
    shortest,
    P: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
):
    C: tl.constexpr = H * (M + V)
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    x_ptr = projected_ptr + row * num_tokens * P
    tail_ptr += row * ((TAPS - 1) * C)
    new_tail_ptr += row * ((TAPS - 1) * C)
    is_token = (tokens < num_tokens)[:, None]
    steps = tl.arange(0, TAIL)
    if tl.program_id(1) == 0:  # one program for each head writes its part of the tail
        length = num_tokens
        if lengths_ptr is not None:
            length = tl.load(lengths_ptr + row).to(tl.int32)
        if head < H:
            of_route = head * M + tl.arange(0, M)
            routes = _joined(x_ptr, tail_ptr, length + steps, num_tokens, of_route, P, C, TAPS)
            to = new_tail_ptr + steps[:, None] * C + of_route[None, :]
            tl.store(to, routes, mask=(steps < TAPS - 1)[:, None])
        else:
            of_value = H * M + (head - H) * V + tl.arange(0, V)
            values = _joined(x_ptr, tail_ptr, length + steps, num_tokens, of_value, P, C, TAPS)
            there = new_tail_ptr + steps[:, None] * C + of_value[None, :]
            tl.store(there, values, mask=(steps < TAPS - 1)[:, None])
    if head < H:
        route = head * M + tl.arange(0, M)
        query = tl.zeros([TOKENS, M], tl.float32)
        key = tl.zeros([TOKENS, M], tl.float32)
        for back in tl.static_range(TAPS):
            tap = TAPS - 1 - back
            x = _joined(x_ptr, tail_ptr, tokens + tap, num_tokens, route, P, C, TAPS)
            query = query + tl.load(read_taps_ptr + tap * (H * M) + route)[None, :] * x
            key = key + tl.load(write_taps_ptr + tap * (H * M) + route)[None, :] * x
        to = (row * num_tokens + tokens)[:, None] * (H * M) + route[None, :]
        tl.store(q_ptr + to, _unit(query, shortest).to(q_ptr.dtype.element_ty), mask=is_token)
        tl.store(k_ptr + to, _unit(key, shortest).to(k_ptr.dtype.element_ty), mask=is_token)
    else:
        own = (head - H) * V + tl.arange(0, V)
        value = tl.zeros([TOKENS, V], tl.float32)
        for back in tl.static_range(TAPS):
            own_tap = TAPS - 1 - back
            own_x = _joined(x_ptr, tail_ptr, tokens + own_tap, num_tokens, H * M + own, P, C, TAPS)
            value = value + tl.load(value_taps_ptr + own_tap * (H * V) + own)[None, :] * own_x
        at = (row * num_tokens + tokens)[:, None] * (H * V) + own[None, :]
        tl.store(v_ptr + at, value.to(v_ptr.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=["num_rows"])
def _output(
    read_ptr,
    value_ptr,
    projected_ptr,
    gain_ptr,
    skip_ptr,
    out_ptr,
    num_rows,
    eps,
    P: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    own = tl.program_id(0) * V + tl.arange(0, V)
    mask = (tokens < num_rows)[:, None]
    at = tokens[:, None].to(tl.int64) * (H * V) + own[None, :]
    read = tl.load(read_ptr + at, mask=mask, other=0.0).to(tl.float32)
    read = read * (1.0 / tl.sqrt(tl.sum(read * read, axis=1) / V + eps))[:, None]
    read = read * tl.load(gain_ptr + own)[None, :]
    read += tl.load(value_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(skip_ptr + own)[None, :]
    beside = tokens[:, None].to(tl.int64) * P + C + own[None, :]
    gate = tl.load(projected_ptr + beside, mask=mask, other=0.0).to(tl.float32)
    read = read * gate * tl.sigmoid(gate)
    tl.store(out_ptr + at, read.to(out_ptr.dtype.element_ty), mask=mask)


def read_rates(rates: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """rates [B,T,2H] fp32, of strength and decay -> strength and log decay [B,T,H], 0 behind `lengths` [B] int64."""
    batch, num_tokens, both = rates.shape
    strength, log_decay = (rates.new_empty(batch, num_tokens, both // 2) for _ in range(2))
    with torch.cuda.device_of(rates):
        _rates[(triton.cdiv(batch * num_tokens, RATE_TOKENS),)](
            rates,
            lengths,
            strength,
            log_decay,
            num_tokens,
            batch * num_tokens,
            H=both // 2,
            HEADS=triton.next_power_of_2(both // 2),
            TOKENS=RATE_TOKENS,
            num_warps=4,
        )
    return strength, log_decay


def read_context(
    projected: Tensor, taps: Taps, tail: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """projected [B,T,P]: routes [H M], values [H V], gates; tail [B, taps-1, H M + H V] fp32: routes and values before.

    Returns q, k [B,T,H,M] and v [B,T,H,V] in the dtype of `projected`, and the tail [B, taps-1, ...] after `lengths`.
    """
    batch, num_tokens, width = projected.shape
    num_taps, slots, values = taps.read.shape[0], taps.read.shape[1] // taps.heads, taps.value.shape[1] // taps.heads
    q, k = (projected.new_empty(batch, num_tokens, taps.heads, slots) for _ in range(2))
    v, new_tail = projected.new_empty(batch, num_tokens, taps.heads, values), torch.empty_like(tail)
    with torch.cuda.device_of(projected):
        _context[(2 * taps.heads, triton.cdiv(num_tokens, TOKENS), batch)](
            projected,
            tail,
            lengths,
            taps.read,
            taps.write,
            taps.value,
            q,
            k,
            v,
            new_tail,
            num_tokens,
            SHORTEST,
            P=width,
            H=taps.heads,
            M=slots,
            V=values,
            TAPS=num_taps,
            TAIL=max(2, triton.next_power_of_2(num_taps - 1)),
            TOKENS=TOKENS,
            num_warps=4,
            enable_fp_fusion=False,  # a product is rounded before it is added, as in the plain convolution
        )
    return q, k, v, new_tail


def gated_output(read: Tensor, value: Tensor, projected: Tensor, gain: Tensor, skip: Tensor, eps: float) -> Tensor:
    """read, value [B,T,H,V]; projected [B,T,P], whose last H V are gates; gain, skip [H V] fp32 -> [B,T,H V]."""
    batch, num_tokens, heads, width = read.shape
    read, out = read.contiguous(), read.new_empty(batch, num_tokens, heads * width)
    num_rows = batch * num_tokens
    with torch.cuda.device_of(read):
        _output[(heads, triton.cdiv(num_rows, TOKENS))](
            read,
            value,
            projected,
            gain,
            skip,
            out,
            num_rows,
            eps,
            P=projected.shape[-1],
            C=projected.shape[-1] - heads * width,
            H=heads,
            V=width,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return out
