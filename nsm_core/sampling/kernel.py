"""The sampler's steps as one kernel: a program chooses the token of one row (see Sampler for the steps).

All sums are fp64 and run over the whole row in one order: neighbours change nothing. Thresholds are found by halving
the range of the weights' bit patterns, whose order is that of the weights: nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.sampling.result import NOT_FINITE as NOT_FINITE  # the kernel below writes it as a number

# The columns of a row's parameters, all in 64 bits; the last three are the bits of doubles.
NUM_PARAMS = 7
LARGEST_ROW = 16384  # lies in the registers of one program; larger ones are read in tiles (large_kernel.py)
LARGEST_VOCABULARY = 1 << 18


@triton.jit
def uniform_draw(seed, choice, position):
    """The draw of `nsm_core.sampling.rng`, to the bit: Philox4x64-10."""
    first_factor = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    second_factor = tl.full([], 0xCA5A826395121157, tl.uint64)
    first_key, second_key = seed.to(tl.uint64, bitcast=True), choice.to(tl.uint64, bitcast=True)
    zero = tl.full([], 0, tl.uint64)
    a, b, c, d = position.to(tl.uint64, bitcast=True) + 1, zero, zero, zero
    for _ in tl.static_range(10):
        high, low = tl.umulhi(first_factor, a), first_factor * a
        second_high, second_low = tl.umulhi(second_factor, c), second_factor * c
        a, b, c, d = second_high ^ b ^ first_key, second_low, high ^ d ^ second_key, low
        first_key += tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        second_key += tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    return (a >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def drawn(params_ptr):
    """The draw of the row with these parameters."""
    return uniform_draw(tl.load(params_ptr), tl.load(params_ptr + 1), tl.load(params_ptr + 2))


@triton.jit
def draw_target(u, total):
    """What a cumulative weight must exceed: u times the total, and less than the total."""
    below_total = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.minimum(u * total, below_total)


@triton.jit
def choice_params(params_ptr):
    """Temperature, top-k, top-p and min-p of a row."""
    temperature = tl.load(params_ptr + 4).to(tl.float64, bitcast=True).to(tl.float32)
    top_k = tl.load(params_ptr + 3).to(tl.int32)
    top_p = tl.load(params_ptr + 5).to(tl.float64, bitcast=True)
    min_p = tl.load(params_ptr + 6).to(tl.float64, bitcast=True).to(tl.float32)
    return temperature, top_k, top_p, min_p


@triton.jit
def is_finite(x):
    return (x == x) & (tl.abs(x) != float("inf"))


@triton.jit
def allowed(x, words_ptr, ids, is_id):
    """Logits; minus infinity for tokens that the row may not have. `words_ptr`: of the row; None: it may have all."""
    if words_ptr is not None:
        words = tl.load(words_ptr + (ids >> 5), mask=is_id, other=0)
        x = tl.where(((words >> (ids & 31)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _keep_first(weights, threshold, num_equal):
    """Weights above the threshold, and the first `num_equal` of those that equal it; the others become 0."""
    bits = weights.to(tl.int32, bitcast=True)
    is_equal = bits == threshold
    rank = tl.cumsum(is_equal.to(tl.int32), axis=0)
    return tl.where((bits > threshold) | (is_equal & (rank <= num_equal)), weights, 0.0)


@triton.jit
def _keep_top_k(weights, top_k):
    bits = weights.to(tl.int32, bitcast=True)
    threshold = 0
    for step in tl.range(31):
        candidate = threshold | (1 << (30 - step))
        threshold = tl.where(tl.sum((bits >= candidate).to(tl.int32), axis=0) >= top_k, candidate, threshold)
    return _keep_first(weights, threshold, top_k - tl.sum((bits > threshold).to(tl.int32), axis=0))


@triton.jit
def _keep_top_p(weights, top_p):
    bits = weights.to(tl.int32, bitcast=True)
    wide = weights.to(tl.float64)
    wanted = top_p * tl.sum(wide, axis=0)
    threshold = 0
    for step in tl.range(31):
        candidate = threshold | (1 << (30 - step))
        reached = tl.sum(tl.where(bits >= candidate, wide, 0.0), axis=0)
        threshold = tl.where(reached >= wanted, candidate, threshold)
    missing = wanted - tl.sum(tl.where(bits > threshold, wide, 0.0), axis=0)
    each = tl.max(tl.where(bits == threshold, wide, 0.0), axis=0)
    return _keep_first(weights, threshold, tl.maximum(tl.ceil(missing / each), 1.0).to(tl.int32))


@triton.jit
def _draw(weights, ids, u):
    """The first id whose cumulative weight exceeds u times the total."""
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    target = draw_target(u, tl.max(cumulative, axis=0))
    # sums made in a tree may grow by rounding where a weight is 0: no such token is ever chosen
    is_token = weights > 0.0
    last = tl.max(tl.where(is_token, ids, 0), axis=0)
    return tl.minimum(tl.min(tl.where(is_token & (cumulative > target), ids, last), axis=0), last)


@triton.jit
def _choose(x, top, ids, params_ptr, smallest):
    """The token of a row that is not greedy; x [V padded], `top` its largest."""
    temperature, top_k, top_p, min_p = choice_params(params_ptr)
    weights = tl.exp((x - top) / tl.maximum(temperature, smallest))
    if top_k > 0:
        weights = _keep_top_k(weights, top_k)
    if top_p < 1.0:
        weights = _keep_top_p(weights, top_p)
    if min_p > 0.0:
        weights = tl.where(weights >= min_p * tl.max(weights, axis=0), weights, 0.0)
    return _draw(weights, ids, drawn(params_ptr))


@triton.jit
def _sample(
    logits_ptr,
    stride,
    params_ptr,
    words_ptr,
    num_words,
    chosen_ptr,
    vocab_size,
    smallest,
    PARAMS: tl.constexpr,
    VOCAB: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, VOCAB)
    is_id = ids < vocab_size
    x = tl.load(logits_ptr + row * stride + ids, mask=is_id, other=-float("inf"))
    num_finite = tl.sum((is_finite(x) & is_id).to(tl.int32), axis=0)
    if words_ptr is not None:
        words_ptr += row * num_words
    x = allowed(x, words_ptr, ids, is_id)
    top = tl.max(x, axis=0)
    chosen = tl.min(tl.where(x == top, ids, VOCAB), axis=0)
    if params_ptr is not None:
        params_ptr += row * PARAMS
        is_drawn = tl.load(params_ptr + 4) != 0  # a temperature of 0 has no bit set
        if is_drawn & (num_finite == vocab_size):
            chosen = _choose(x, top, ids, params_ptr, smallest)
    tl.store(chosen_ptr + row, tl.where(num_finite == vocab_size, chosen, -1).to(tl.int64))


def choose_tokens(logits: Tensor, params: Tensor | None, words: Tensor | None = None) -> Tensor:
    """logits [B,V] fp32, V at most LARGEST_ROW -> ids [B] int64, NOT_FINITE for a row that is not finite.

    params [B, NUM_PARAMS] int64: seed, choice index, position, top-k, then the bits of the fp64 temperature, top-p and
    min-p. None: every row is greedy. words [B,ceil(V/32)] int32: the tokens that each row may have, at least one, as
    `TokenMasks` has them. None: all.
    """
    rows, vocab_size = logits.shape
    chosen = logits.new_empty(rows, dtype=torch.int64)
    _sample[(rows,)](
        logits,
        logits.stride(0),
        params,
        words,
        0 if words is None else words.shape[1],
        chosen,
        vocab_size,
        torch.finfo(torch.float32).tiny,
        PARAMS=NUM_PARAMS,
        VOCAB=triton.next_power_of_2(vocab_size),
        num_warps=16 if vocab_size > 2048 else 4,
    )
    return chosen
