"""The steps from a model's logits to the distribution of the draw, each on one row.

Arrays are [V] fp32 and are changed in place. No step lets one row of the batch touch another, so a row's result cannot
depend on its neighbours. The order in which the sampler applies them is in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nsm_core.sampling.counts import TokenCounts
from nsm_core.sampling.params import SamplingParams

Row = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
# 8 exponent bits and 3 mantissa bits: 8 buckets to each factor of two, about a thousand for weights in [0, 1]
_BUCKET_SHIFT = 20


def needs_adjustment(params: SamplingParams, counts: Mapping[int, int]) -> bool:
    """Whether `adjust` would change anything."""
    return bool(params.logit_bias) or (params.has_penalties and len(counts) > 0)


def adjust(logits: Row, params: SamplingParams, counts: Mapping[int, int]) -> None:
    """Adds the logit bias, then the penalties for the tokens in `counts` (those with a count above 0)."""
    if params.logit_bias:
        bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        logits[bias_ids] = _to_fp32(logits[bias_ids] + np.fromiter(params.logit_bias.values(), np.float64))
    if params.has_penalties and counts:
        ids, nums = counts.nonzero() if isinstance(counts, TokenCounts) else _to_arrays(counts)
        logits[ids] = _penalised(logits[ids], nums, params)


def _penalised(logits: Row, nums: npt.NDArray[np.int64], params: SamplingParams) -> Row:
    wide = logits.astype(np.float64)  # a tiny repetition penalty leaves the range of fp32
    with np.errstate(over="ignore"):  # infinity becomes the largest number of fp32
        repeated = np.where(wide > 0, wide / params.repetition_penalty, wide * params.repetition_penalty)
    repeated -= params.presence_penalty + params.frequency_penalty * nums
    return np.where(nums > 0, _to_fp32(repeated), logits)


def _to_arrays(counts: Mapping[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return np.fromiter(counts.keys(), np.int64, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))


def _to_fp32(values: npt.NDArray[np.floating[Any]]) -> Row:
    narrow: Row = np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
    return narrow


def to_weights(logits: npt.NDArray[np.float32], temperatures: npt.NDArray[np.float32]) -> None:
    """Logits [R, V] become probabilities up to a factor, in place: exp((x - max) / temperature); the largest is 1.

    temperatures [R], above 0. Only a row's maximum and operations on single elements: rows stay apart.
    """
    with np.errstate(over="ignore", under="ignore"):  # a weight too small for fp32 is 0: it is never drawn
        np.subtract(logits, logits.max(axis=-1, keepdims=True), out=logits)
        # The smallest normal number stands for a temperature that fp32 cannot hold: 0 / 0 has no meaning
        np.divide(logits, np.maximum(temperatures, np.float32(_SMALLEST))[:, None], out=logits)
        np.exp(logits, out=logits)


def apply_filters(weights: Row, params: SamplingParams) -> None:
    """Top-k, then top-p of the rest, then min-p: weights of the filtered tokens become 0."""
    keep_top_k(weights, params.top_k)
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return
    # After top-k only a few weights are left: gathered, they cost almost no time
    ids = np.flatnonzero(weights) if params.top_k > 0 else slice(None)
    left = weights[ids]
    keep_top_p(left, params.top_p)
    keep_min_p(left, params.min_p)
    weights[ids] = left


def keep_top_k(weights: Row, top_k: int) -> None:
    """Weights of all but the `top_k` most likely tokens become 0; of equal ones the lowest ids remain. 0: all."""
    if 0 < top_k < len(weights):
        buckets = _buckets(weights)
        reached = np.cumsum(np.bincount(buckets)[::-1])
        _keep_fewest(weights, buckets, reached, wanted=top_k, measure=np.ones_like)


def keep_top_p(weights: Row, top_p: float) -> None:
    """Keeps the fewest most likely tokens that hold at least `top_p` of all weight; of equal ones the lowest ids."""
    if top_p < 1.0:
        buckets = _buckets(weights)
        reached = np.cumsum(np.bincount(buckets, weights=weights)[::-1])
        _keep_fewest(weights, buckets, reached, wanted=top_p * reached[-1], measure=np.asarray)


def keep_min_p(weights: Row, min_p: float) -> None:
    """Weights below `min_p` times the largest become 0."""
    if min_p > 0.0:
        weights *= weights >= min_p * weights.max()


def _buckets(weights: Row) -> npt.NDArray[np.int32]:
    # For floats that are not negative the order of the bit patterns is the order of the values
    return weights.view(np.int32) >> _BUCKET_SHIFT


def _keep_fewest(
    weights: Row,
    buckets: npt.NDArray[np.int32],
    reached: npt.NDArray[Any],
    *,
    wanted: float,
    measure: Callable[[Row], npt.NDArray[Any]],
) -> None:
    """Keeps tokens from the most likely one downwards until their summed measure reaches `wanted`.

    `reached[i]` is the measure of the i + 1 highest buckets. The histogram finds the bucket of the last kept token, so
    that only this one is sorted: sorting whole rows would cost several times as much.
    """
    num_whole = int(np.searchsorted(reached, wanted))
    above = reached[num_whole - 1] if num_whole > 0 else 0
    members = np.sort(weights[buckets == len(reached) - 1 - num_whole])[::-1]
    within = above + np.cumsum(measure(members), dtype=np.float64)
    num_remaining = min(int(np.searchsorted(within, wanted)) + 1, len(members))  # min: the two sums may round apart
    threshold = members[num_remaining - 1]
    weights *= weights >= threshold
    if num_remaining < len(members) and members[num_remaining] == threshold:
        num_equal = int(np.count_nonzero(members[:num_remaining] == threshold))
        weights[np.flatnonzero(weights == threshold)[num_equal:]] = 0.0
