"""Outcomes and durations of calls for tokens, from gateways and from other clients of Triton."""

from __future__ import annotations

import bisect
import collections
import itertools
import threading
import time
from collections.abc import Iterator, Sequence

from nsm_core.triton.responder import Responder
from nsm_core.wire.errors import Failure, encode_failure
from nsm_core.wire.tensors import FINISH_REASON, TOKEN_IDS, Tensors

CALL_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Ends that are there from the start, so that a rate sees the first of them. Other codes come when they happen
USUAL_OUTCOMES = ("stop", "length", "abort", "overloaded", "invalid_request", "engine_dead", "deadline_exceeded")


class Histogram:
    """Observations by upper bound, as Prometheus has them. One thread observes."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(`le`, observations up to it), the last of them +Inf with all."""
        names = (*map(str, self._bounds), "+Inf")
        return zip(names, itertools.accumulate(list(self._counts)), strict=True)


class CallStats:
    """Totals since the worker started."""

    def __init__(self) -> None:
        self.first_token = Histogram(CALL_BOUNDS)
        self.gaps = Histogram(GAP_BOUNDS)
        self.whole = Histogram(CALL_BOUNDS)
        self._outcomes: collections.Counter[str] = collections.Counter(dict.fromkeys(USUAL_OUTCOMES, 0))
        self._lock = threading.Lock()

    def outcomes(self) -> dict[str, int]:
        """Calls by how they ended: a finish reason, or the code of an error."""
        with self._lock:
            return dict(self._outcomes)

    def ended(self, outcome: str) -> None:
        """Any thread."""
        with self._lock:
            self._outcomes[outcome] += 1


class CallClock:
    """Counts and times one call. Made when it arrives."""

    def __init__(self, stats: CallStats) -> None:
        self._stats = stats
        self._arrived = time.monotonic()
        self._newest: float | None = None  # when the answer before this one with tokens was sent

    @property
    def has_tokens(self) -> bool:
        """Whether an answer with tokens was sent."""
        return self._newest is not None

    def sent_tokens(self, number: int, now: float) -> None:
        """Tokens of one answer share its gap. Of the first answer the first has none."""
        if self._newest is None:
            self._stats.first_token.observe(now - self._arrived)
            self._stats.gaps.observe(0.0, number - 1)
        else:
            self._stats.gaps.observe((now - self._newest) / number, number)
        self._newest = now

    def ended(self, outcome: str, now: float) -> None:
        """Well, with a finish reason."""
        self._stats.whole.observe(now - self._arrived)
        self._stats.ended(outcome)

    def failed(self, failure: Failure) -> None:
        self._stats.ended(encode_failure(failure).partition(":")[0])


class MeasuredResponder:
    """A responder whose answers are counted and timed. Made when the call arrives; the worker's loop sends."""

    def __init__(self, responder: Responder, stats: CallStats) -> None:
        self._responder = responder
        self._clock = CallClock(stats)

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        self._responder.send(tensors, is_last=is_last)
        now = time.monotonic()
        if is_last:
            self._clock.ended(tensors[FINISH_REASON][0].decode(), now)
        elif num_tokens := len(tensors.get(TOKEN_IDS, ())):  # the last has some only if it is the whole of a call
            self._clock.sent_tokens(num_tokens, now)

    def fail(self, failure: Failure) -> None:
        self._responder.fail(failure)
        self._clock.failed(failure)

    def close(self) -> None:
        self._responder.close()

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled()
