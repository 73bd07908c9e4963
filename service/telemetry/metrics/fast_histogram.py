"""Histograms for values that come with every token or every request."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.telemetry.metrics.shared import is_shared


def repeated_histogram(
    name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry
) -> RepeatedHistogram:
    """A histogram for values that come often: of this process, or of all that share their numbers."""
    kind = SharedHistogram if is_shared() else FastHistogram
    return kind(name, text, buckets=buckets, registry=registry)


class SharedHistogram:
    """The library's, whose numbers other processes see. They are written there by `refresh`: for each value it would
    cost more than all else that the metrics do.
    """

    def __init__(self, name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._histogram = Histogram(name, text, buckets=buckets, registry=registry)
        self._bounds = [*buckets, float("inf")]
        self._begin()

    def _begin(self) -> None:
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float, number: int = 1) -> None:
        """The value came so many times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += number
        self._sum += value * number

    def refresh(self) -> None:
        """Other processes see all values until now."""
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._begin()


class FastHistogram(Collector):
    """A `Histogram` without labels and locks, for one thread: an observation takes a third of the time."""

    def __init__(self, name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, number: int = 1) -> None:
        """The value came so many times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += number
        self._sum += value * number

    def refresh(self) -> None:
        """Its reader asks it itself."""

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The name, for the registry."""
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Cumulative counts, as Prometheus reads them."""
        total, buckets = 0, []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            name = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((name, float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


RepeatedHistogram = FastHistogram | SharedHistogram
