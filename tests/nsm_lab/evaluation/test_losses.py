from __future__ import annotations

import math

import numpy as np
import pytest

from nsm_core.errors import ConfigError
from nsm_lab.evaluation.losses import DEFAULT_BUCKETS, BucketLoss, LossTally


def bucket(**fields: float) -> BucketLoss:
    values = {"start": 0, "stop": None, "num_tokens": 10, "num_bytes": 40, "num_words": 8, "nats": 20.0, **fields}
    return BucketLoss(**values)  # type: ignore[arg-type]


def test_rates_follow_from_the_sums() -> None:
    loss = bucket()
    assert loss.nats_per_token == 2.0
    assert loss.bits_per_byte == pytest.approx(20.0 / math.log(2) / 40)
    assert loss.word_perplexity == pytest.approx(math.exp(2.5))


def test_rates_without_a_denominator_or_out_of_range_are_none() -> None:
    assert bucket(num_tokens=0).nats_per_token is None
    assert bucket(num_bytes=0).bits_per_byte is None
    assert bucket(num_words=0).word_perplexity is None
    assert bucket(num_words=1, nats=1e6).word_perplexity is None


def test_tokens_fall_into_the_bucket_of_their_position() -> None:
    tally = LossTally((0, 4, 8))
    ones = np.ones(7, np.int64)
    tally.add(start=0, nats=np.arange(7.0), num_bytes=2 * ones, num_words=0 * ones)
    tally.add(start=7, nats=np.full(7, 0.5), num_bytes=ones, num_words=ones)
    result = tally.result(num_documents=1)
    assert [(b.start, b.stop, b.num_tokens) for b in result.buckets] == [(0, 4, 4), (4, 8, 4), (8, None, 6)]
    assert [b.nats for b in result.buckets] == [6.0, 15.5, 3.0]
    assert [b.num_bytes for b in result.buckets] == [8, 7, 6]
    assert [b.num_words for b in result.buckets] == [0, 1, 6]
    assert (result.total.num_tokens, result.total.nats, result.total.num_words) == (14, 24.5, 7)


def test_buckets_nobody_reached_are_left_out() -> None:
    tally = LossTally(DEFAULT_BUCKETS)
    tally.add(start=300, nats=np.ones(2), num_bytes=np.ones(2, np.int64), num_words=np.ones(2, np.int64))
    assert [(b.start, b.stop) for b in tally.result(1).buckets] == [(256, 512)]


@pytest.mark.parametrize("edges", [(), (1, 2), (0, 4, 4), (0, 8, 4)], ids=["none", "not-0", "equal", "falling"])
def test_edges_that_make_no_buckets_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="bucket edges must ascend from 0"):
        LossTally(edges)


def test_sums_in_wider_buckets() -> None:
    tally = LossTally((0, 4, 8, 16))
    tally.add(start=0, nats=np.arange(20.0), num_bytes=np.ones(20, np.int64), num_words=np.ones(20, np.int64))
    losses = tally.result(1)
    assert [(b.start, b.stop, b.num_tokens) for b in losses.by((0, 8, 16))] == [(0, 8, 8), (8, 16, 8), (16, None, 4)]
    assert sum(b.nats for b in losses.by((0, 8))) == pytest.approx(losses.total.nats)
    assert losses.by((0, 6)) == ()  # cuts a bucket
