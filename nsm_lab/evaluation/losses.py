"""What an evaluation adds up: loss by position, and the numbers people quote."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.errors import ConfigError

# Edges in tokens from the start of the document; the last bucket has no end.
DEFAULT_BUCKETS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Of the short table, made from the buckets.
SUMMARY_EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768)

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketLoss:
    """Summed loss of the predicted tokens at positions [start, stop); `stop` None: no end."""

    start: int
    stop: int | None
    num_tokens: int
    num_bytes: int  # of the predicted tokens, UTF-8
    num_words: int  # whitespace-separated, counted where they begin
    nats: float

    @property
    def nats_per_token(self) -> float | None:
        return self.nats / self.num_tokens if self.num_tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats per word): comparable between tokenizers. None without words, or when it is no longer a number."""
        nats_per_word = self.nats / self.num_words if self.num_words else math.inf
        return math.exp(nats_per_word) if nats_per_word < 700 else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PositionLosses:
    """Result of one evaluation; `buckets` holds those that any document reached."""

    num_documents: int
    buckets: tuple[BucketLoss, ...]

    @property
    def total(self) -> BucketLoss:
        """All positions as one bucket."""
        return _merged(self.buckets, 0, None)

    def by(self, edges: Sequence[int]) -> tuple[BucketLoss, ...]:
        """The same sums in wider buckets; none at all when an edge cuts a bucket in two."""
        ranges = zip(edges, [*edges[1:], None], strict=True)
        merged = [_merged([b for b in self.buckets if _lies_in(b, *bounds)], *bounds) for bounds in ranges]
        if sum(bucket.num_tokens for bucket in merged) != self.total.num_tokens:
            return ()
        return tuple(bucket for bucket in merged if bucket.num_tokens)


def _lies_in(bucket: BucketLoss, start: int, stop: int | None) -> bool:
    return bucket.start >= start and (stop is None or (bucket.stop is not None and bucket.stop <= stop))


def _merged(buckets: Sequence[BucketLoss], start: int, stop: int | None) -> BucketLoss:
    return BucketLoss(
        start=start,
        stop=stop,
        num_tokens=sum(bucket.num_tokens for bucket in buckets),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
        num_words=sum(bucket.num_words for bucket in buckets),
        nats=math.fsum(bucket.nats for bucket in buckets),
    )


def check_edges(edges: Sequence[int]) -> None:
    """Raises ConfigError unless they ascend from 0."""
    if not edges or edges[0] != 0 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ConfigError(f"bucket edges must ascend from 0, got {list(edges)}")


class LossTally:
    """Adds up per-token losses into buckets of positions."""

    def __init__(self, edges: Sequence[int]) -> None:
        """`edges`: ascending from 0. Raises ConfigError."""
        check_edges(edges)
        self._edges = np.array(edges, np.int64)
        self._counts = np.zeros((3, len(edges)), np.int64)  # tokens, bytes, words
        self._nats = np.zeros(len(edges), np.float64)

    def add(self, *, start: int, nats: FloatArray, num_bytes: IntArray, num_words: IntArray) -> None:
        """Tokens at positions start, start + 1, …; all arrays [T]."""
        bucket = np.searchsorted(self._edges, start + np.arange(len(nats)), side="right") - 1
        np.add.at(self._nats, bucket, nats)
        for counts, values in zip(self._counts, (np.ones_like(num_bytes), num_bytes, num_words), strict=True):
            np.add.at(counts, bucket, values)

    def result(self, num_documents: int) -> PositionLosses:
        stops = [*self._edges[1:].tolist(), None]
        buckets = [
            BucketLoss(start=start, stop=stop, num_tokens=tokens, num_bytes=num_bytes, num_words=words, nats=nats)
            for start, stop, tokens, num_bytes, words, nats in zip(
                self._edges.tolist(), stops, *self._counts.tolist(), self._nats.tolist(), strict=True
            )
        ]
        return PositionLosses(num_documents=num_documents, buckets=tuple(b for b in buckets if b.num_tokens))
