"""One model on several sets of documents: what its history is worth in all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_lab.evaluation.history.estimates import Estimate, mean_estimate
from nsm_lab.evaluation.history.fresh_starts import FreshStartResult


def gains_together(results: Sequence[FreshStartResult]) -> dict[int, Estimate]:
    """By fresh start, the gain over the documents of all results, each of which counts once.

    Starts that a result lacks, or measured on other spans, are left out.
    """
    gains = [{one.start: one.gain for one in result.starts} for result in results]
    common = [start for start in gains[0] if all(start in of_result for of_result in gains)]
    return {
        start: mean_estimate([value for of_result in gains for value in of_result[start].per_document])
        for start in common
        if len({_spans(result, start) for result in results}) == 1
    }


def _spans(result: FreshStartResult, start: int) -> tuple[int, int, tuple[int, ...]]:
    """What a gain over `start` was measured on: see `measure_fresh_starts`."""
    return start, result.span_len, tuple(first for first in result.spans if 2 * start <= first)
