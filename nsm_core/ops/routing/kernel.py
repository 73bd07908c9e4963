"""Routing as two kernels: one pass over the logits forward, one over logits and gradient backward.

A program handles one head of a few tokens; a token's M logits stay in registers, the (k+1)-th largest score is found by
taking maxima. What crosses programs (the gradient of the timescales) goes through partial sums: the result does not
depend on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN

# Slots of a head, rounded up to a power of two -> (tokens a program, warps): 16 values a thread.
TILES = {16: (128, 4), 32: (64, 4), 64: (32, 2), 128: (16, 4), 256: (8, 4)}
LARGER_TILE = (4, 8)


@triton.jit
def _one_minus_exp_of_minus(x):
    """1 - exp(-x) for x >= 0, accurate near 0: expm1 is not part of the language."""
    series = 1.0 - x * (1 / 6) * (1.0 - x * (1 / 7))
    series = 1.0 - x * (1 / 3) * (1.0 - x * (1 / 4) * (1.0 - x * (1 / 5) * series))
    series = x * (1.0 - x * (1 / 2) * series)
    return tl.where(x < 0.3, series, 1.0 - tl.exp(-x))


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)); log1p(u) = 2 artanh(u / (2 + u)), a series that is exact to fp32 on [0, 1]."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def kth_largest_after(scores, TOP_K: tl.constexpr):
    """scores [R, M] -> [R]: the (TOP_K + 1)-th largest of each row, equal scores counted one by one.

    Maxima of strictly lower scores find it where no scores are equal. Where some are, the result is too low, and goes
    up until no more than TOP_K scores are above it.
    """
    threshold = tl.max(scores, axis=1)
    for _ in range(TOP_K):
        lower = tl.where(scores < threshold[:, None], scores, -float("inf"))
        threshold = tl.max(lower, axis=1)
    above = tl.sum((scores > threshold[:, None]).to(tl.int32), axis=1)
    while tl.max(above, axis=0) > TOP_K:
        higher = tl.where(scores > threshold[:, None], scores, float("inf"))
        threshold = tl.where(above > TOP_K, tl.min(higher, axis=1), threshold)
        above = tl.sum((scores > threshold[:, None]).to(tl.int32), axis=1)
    return threshold


@triton.jit
def distribution(logits, scores, threshold, taper, TAPERED: tl.constexpr):
    """The write distribution [R, M]. Nothing masks a NaN: it reaches the output, as in the reference."""
    weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    if TAPERED:
        weights *= _one_minus_exp_of_minus(tl.maximum(scores - threshold[:, None], 0.0) / taper)
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _may_write(valid_ptr, tokens, is_token):
    """[R] bool: which of the tokens are there and may write."""
    if valid_ptr is not None:
        is_token &= tl.load(valid_ptr + tokens, mask=is_token, other=0) != 0
    return is_token


@triton.jit
def _forward(
    logits_ptr,
    strength_ptr,
    bias_ptr,
    timescale_ptr,
    valid_ptr,
    log_decay_ptr,
    threshold_ptr,
    num_tokens,
    taper,
    floor,
    H: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    head = tl.program_id(0) % H
    tokens = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.arange(0, SLOTS)
    is_token, is_slot = tokens < num_tokens, slots < M
    rows = tokens * H + head
    at = rows[:, None] * M + slots
    mask = is_token[:, None] & is_slot
    logits = tl.load(logits_ptr + at, mask=mask, other=-float("inf"))
    strength = softplus(tl.load(strength_ptr + rows, mask=is_token, other=0.0))
    timescale = tl.exp(tl.load(timescale_ptr + head * M + slots, mask=is_slot, other=0.0))
    bias = tl.load(bias_ptr + head * M + slots, mask=is_slot, other=0.0)
    # rows past the end must not make the search for ties run longer, or their sums NaN
    logits = tl.where(is_token[:, None], logits, -slots.to(tl.float32))
    scores = logits + bias
    threshold = tl.max(logits, axis=1)
    if TOP_K < M:
        threshold = kth_largest_after(scores, TOP_K)
        tl.store(threshold_ptr + rows, threshold, mask=is_token)
    routing = distribution(logits, scores, threshold, taper, TOP_K < M)
    raw = -timescale * strength[:, None] * routing
    log_decay = tl.where(_may_write(valid_ptr, tokens, is_token)[:, None], tl.where(raw < floor, floor, raw), 0.0)
    tl.store(log_decay_ptr + at, log_decay, mask=mask)


@triton.jit
def _backward(
    logits_ptr,
    strength_ptr,
    bias_ptr,
    timescale_ptr,
    valid_ptr,
    threshold_ptr,
    grad_ptr,
    d_logits_ptr,
    d_strength_ptr,
    d_timescale_ptr,
    num_tokens,
    taper,
    floor,
    H: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    head = tl.program_id(0) % H
    tokens = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.arange(0, SLOTS)
    is_token, is_slot = tokens < num_tokens, slots < M
    rows = tokens * H + head
    at = rows[:, None] * M + slots
    mask = is_token[:, None] & is_slot
    logits = tl.load(logits_ptr + at, mask=mask, other=-float("inf"))
    writes = _may_write(valid_ptr, tokens, is_token)[:, None] & is_slot
    grad = tl.load(grad_ptr + at, mask=writes, other=0.0)
    strength = tl.load(strength_ptr + rows, mask=is_token, other=0.0)
    timescale = tl.exp(tl.load(timescale_ptr + head * M + slots, mask=is_slot, other=0.0))
    bias = tl.load(bias_ptr + head * M + slots, mask=is_slot, other=0.0)
    logits = tl.where(is_token[:, None], logits, -slots.to(tl.float32))
    threshold = tl.max(logits, axis=1)
    if TOP_K < M:
        threshold = tl.load(threshold_ptr + rows, mask=is_token, other=-float("inf"))
    routing = distribution(logits, logits + bias, threshold, taper, TOP_K < M)
    write_strength = softplus(strength)
    per_strength = -timescale * routing
    raw = per_strength * write_strength[:, None]
    grad = tl.where(raw < floor, 0.0, grad)
    d_routing = -timescale * write_strength[:, None] * grad
    d_logits = routing * (d_routing - tl.sum(routing * d_routing, axis=1)[:, None])
    d_strength = tl.sum(per_strength * grad, axis=1) * tl.sigmoid(strength)
    tl.store(d_logits_ptr + at, d_logits, mask=mask)
    tl.store(d_strength_ptr + rows, d_strength, mask=is_token)
    # [programs of a head, H, M]: a program's own row of partial sums
    partial = tl.program_id(0).to(tl.int64) * M + slots
    tl.store(d_timescale_ptr + partial, tl.sum(raw * grad, axis=0), mask=is_slot)


def _grid(logits: Tensor) -> tuple[int, int, dict[str, int]]:
    """Tokens, programs a head, and the constants of a launch."""
    heads, slots = logits.shape[-2:]
    block_slots = max(16, triton.next_power_of_2(slots))
    tokens, num_warps = TILES.get(block_slots, LARGER_TILE)
    num_tokens = logits.numel() // (heads * slots)
    constants = {"H": heads, "M": slots, "TOKENS": tokens, "SLOTS": block_slots, "num_warps": num_warps}
    return num_tokens, triton.cdiv(num_tokens, tokens), constants


def routing_forward(
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    valid: Tensor | None,
    top_k: int,
    taper: float,
) -> tuple[Tensor, Tensor]:
    """All fp32; shapes as in `routing_reference`. Returns log_decay and the (k+1)-th largest scores [..., H].

    The second is undefined where top_k is the number of slots: there is no such score.
    """
    logits, strength = logits.contiguous(), strength.contiguous()
    log_decay, threshold = torch.empty_like(logits), torch.empty_like(strength)
    num_tokens, programs, constants = _grid(logits)
    if num_tokens == 0:
        return log_decay, threshold
    with torch.cuda.device_of(logits):
        _forward[(programs * constants["H"],)](
            logits,
            strength,
            selection_bias.contiguous(),
            log_timescale.contiguous(),
            None if valid is None else valid.contiguous(),
            log_decay,
            threshold,
            num_tokens,
            taper,
            LOG_DECAY_MIN,
            TOP_K=top_k,
            **constants,
        )
    return log_decay, threshold


def routing_backward(
    logits: Tensor,
    strength: Tensor,
    selection_bias: Tensor,
    log_timescale: Tensor,
    valid: Tensor | None,
    threshold: Tensor,
    grad: Tensor,
    top_k: int,
    taper: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to logits, strength and log_timescale, from the forward pass's inputs and results."""
    logits, strength = logits.contiguous(), strength.contiguous()
    d_logits, d_strength = torch.empty_like(logits), torch.empty_like(strength)
    num_tokens, programs, constants = _grid(logits)
    if num_tokens == 0:
        return d_logits, d_strength, torch.zeros_like(log_timescale)
    partials = logits.new_empty(programs, *log_timescale.shape)
    with torch.cuda.device_of(logits):
        _backward[(programs * constants["H"],)](
            logits,
            strength,
            selection_bias.contiguous(),
            log_timescale.contiguous(),
            None if valid is None else valid.contiguous(),
            threshold,
            grad.contiguous(),
            d_logits,
            d_strength,
            partials,
            num_tokens,
            taper,
            LOG_DECAY_MIN,
            TOP_K=top_k,
            **constants,
        )
    return d_logits, d_strength, partials.sum(dim=0)
