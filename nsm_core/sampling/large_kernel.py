"""The kernel of `kernel.py` for vocabularies that do not fit the registers of one program: a row in tiles.

The weights of a row lie in a buffer, which every pass reads tile by tile. Sums are fp64, within a tile and then over
the tiles in their order: neighbours change nothing. A pass is a function of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsm_core.sampling.kernel import NUM_PARAMS, allowed, choice_params, draw_target, drawn, is_finite

TILE = 8192


@triton.jit
def _tile_of(row_ptr, start, vocab_size, ids):
    return tl.load(row_ptr + start + ids, mask=start + ids < vocab_size, other=0.0)


@triton.jit
def _allowed_tile(row_ptr, words_ptr, start, vocab_size, ids):
    """Logits; minus infinity for tokens that are not allowed, and behind the last."""
    at = start + ids
    x = tl.load(row_ptr + at, mask=at < vocab_size, other=-float("inf"))
    return allowed(x, words_ptr, at, at < vocab_size)


@triton.jit
def _count(row_ptr, vocab_size, least, ids, TILE: tl.constexpr):
    """Weights whose bits are `least` or more."""
    count = 0
    for start in tl.range(0, vocab_size, TILE):
        bits = _tile_of(row_ptr, start, vocab_size, ids).to(tl.int32, bitcast=True)
        count += tl.sum(((bits >= least) & (start + ids < vocab_size)).to(tl.int32), axis=0)
    return count


@triton.jit
def _sum(row_ptr, vocab_size, least, ids, TILE: tl.constexpr):
    """Of weights whose bits are `least` or more."""
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, vocab_size, TILE):
        weights = _tile_of(row_ptr, start, vocab_size, ids)
        wide = tl.where(weights.to(tl.int32, bitcast=True) >= least, weights, 0.0).to(tl.float64)
        total += tl.sum(wide, axis=0)
    return total


@triton.jit
def _keep_first(row_ptr, vocab_size, threshold, num_equal, ids, TILE: tl.constexpr):
    """Weights above the threshold stay, and the first `num_equal` of those that equal it; the others become 0."""
    before = 0
    for start in tl.range(0, vocab_size, TILE):
        weights = _tile_of(row_ptr, start, vocab_size, ids)
        bits = weights.to(tl.int32, bitcast=True)
        is_equal = (bits == threshold) & (start + ids < vocab_size)
        rank = before + tl.cumsum(is_equal.to(tl.int32), axis=0)
        before += tl.sum(is_equal.to(tl.int32), axis=0)
        weights_left = tl.where((bits > threshold) | (is_equal & (rank <= num_equal)), weights, 0.0)
        tl.store(row_ptr + start + ids, weights_left, mask=start + ids < vocab_size)
    tl.debug_barrier()  # other threads of the program read them


@triton.jit
def _keep_top_k(row_ptr, vocab_size, top_k, ids, TILE: tl.constexpr):
    threshold = 0
    for step in tl.range(31):
        candidate = threshold | (1 << (30 - step))
        threshold = tl.where(_count(row_ptr, vocab_size, candidate, ids, TILE) >= top_k, candidate, threshold)
    num_above = _count(row_ptr, vocab_size, threshold + 1, ids, TILE)
    _keep_first(row_ptr, vocab_size, threshold, top_k - num_above, ids, TILE)


@triton.jit
def _keep_top_p(row_ptr, vocab_size, top_p, ids, TILE: tl.constexpr):
    wanted = top_p * _sum(row_ptr, vocab_size, 0, ids, TILE)
    threshold = 0
    for step in tl.range(31):
        candidate = threshold | (1 << (30 - step))
        threshold = tl.where(_sum(row_ptr, vocab_size, candidate, ids, TILE) >= wanted, candidate, threshold)
    missing = wanted - _sum(row_ptr, vocab_size, threshold + 1, ids, TILE)
    each = tl.cast(threshold, tl.float32, bitcast=True).to(tl.float64)
    num_equal = tl.maximum(tl.ceil(missing / each), 1.0).to(tl.int32)
    _keep_first(row_ptr, vocab_size, threshold, num_equal, ids, TILE)


@triton.jit
def _keep_min_p(row_ptr, vocab_size, min_p, ids, TILE: tl.constexpr):
    largest = 0.0
    for start in tl.range(0, vocab_size, TILE):
        largest = tl.maximum(largest, tl.max(_tile_of(row_ptr, start, vocab_size, ids), axis=0))
    for start in tl.range(0, vocab_size, TILE):
        weights = _tile_of(row_ptr, start, vocab_size, ids)
        weights_left = tl.where(weights >= min_p * largest, weights, 0.0)
        tl.store(row_ptr + start + ids, weights_left, mask=start + ids < vocab_size)
    tl.debug_barrier()


@triton.jit
def _draw(row_ptr, vocab_size, u, ids, TILE: tl.constexpr):
    """The first id whose cumulative weight exceeds u times the total."""
    total = tl.full([], 0.0, tl.float64)
    last = 0
    for start in tl.range(0, vocab_size, TILE):
        weights = _tile_of(row_ptr, start, vocab_size, ids)
        total += tl.max(tl.cumsum(weights.to(tl.float64), axis=0), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, start + ids, 0), axis=0))
    target = draw_target(u, total)
    chosen = last
    before = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, vocab_size, TILE):
        weights = _tile_of(row_ptr, start, vocab_size, ids)
        cumulative = before + tl.cumsum(weights.to(tl.float64), axis=0)
        # sums made in a tree may grow by rounding where a weight is 0: no such token is ever chosen
        is_beyond = (weights > 0.0) & (cumulative > target)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_beyond, start + ids, last), axis=0))
        before += tl.max(tl.cumsum(weights.to(tl.float64), axis=0), axis=0)
    return chosen


@triton.jit
def _choose(row_ptr, words_ptr, weights_ptr, params_ptr, top, vocab_size, smallest, ids, TILE: tl.constexpr):
    """The token of a row that is not greedy; `top`: its largest logit."""
    temperature, top_k, top_p, min_p = choice_params(params_ptr)
    for start in tl.range(0, vocab_size, TILE):
        x = _allowed_tile(row_ptr, words_ptr, start, vocab_size, ids)
        weights = tl.exp((x - top) / tl.maximum(temperature, smallest))
        tl.store(weights_ptr + start + ids, weights, mask=start + ids < vocab_size)
    tl.debug_barrier()
    if top_k > 0:
        _keep_top_k(weights_ptr, vocab_size, top_k, ids, TILE)
    if top_p < 1.0:
        _keep_top_p(weights_ptr, vocab_size, top_p, ids, TILE)
    if min_p > 0.0:
        _keep_min_p(weights_ptr, vocab_size, min_p, ids, TILE)
    return _draw(weights_ptr, vocab_size, drawn(params_ptr), ids, TILE)


@triton.jit
def _sample(
    logits_ptr,
    stride,
    params_ptr,
    words_ptr,
    num_words,
    weights_ptr,
    chosen_ptr,
    vocab_size,
    smallest,
    PARAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, TILE)
    row_ptr = logits_ptr + row * stride
    if words_ptr is not None:
        words_ptr += row * num_words
    num_finite, top, chosen = 0, -float("inf"), 0
    for start in tl.range(0, vocab_size, TILE):
        raw = tl.load(row_ptr + start + ids, mask=start + ids < vocab_size, other=float("nan"))
        num_finite += tl.sum(is_finite(raw).to(tl.int32), axis=0)
        x = _allowed_tile(row_ptr, words_ptr, start, vocab_size, ids)
        largest = tl.max(x, axis=0)
        first = tl.min(tl.where(x == largest, start + ids, vocab_size), axis=0)
        chosen = tl.where(largest > top, first, chosen)
        top = tl.maximum(top, largest)
    if params_ptr is not None:
        params_ptr += row * PARAMS
        is_drawn = tl.load(params_ptr + 4) != 0  # a temperature of 0 has no bit set
        if is_drawn & (num_finite == vocab_size):
            own_ptr = weights_ptr + row * vocab_size
            chosen = _choose(row_ptr, words_ptr, own_ptr, params_ptr, top, vocab_size, smallest, ids, TILE)
    tl.store(chosen_ptr + row, tl.where(num_finite == vocab_size, chosen, -1).to(tl.int64))


def choose_of_many(logits: Tensor, params: Tensor | None, words: Tensor | None = None, *, tile: int = TILE) -> Tensor:
    """`choose_tokens` for any vocabulary. `tile`: ids at a time."""
    rows, vocab_size = logits.shape
    chosen = logits.new_empty(rows, dtype=torch.int64)
    weights = logits if params is None else logits.new_empty(rows, vocab_size)  # greedy rows need none
    _sample[(rows,)](
        logits,
        logits.stride(0),
        params,
        words,
        0 if words is None else words.shape[1],
        weights,
        chosen,
        vocab_size,
        torch.finfo(torch.float32).tiny,
        PARAMS=NUM_PARAMS,
        TILE=tile,
        num_warps=16,
    )
    return chosen
