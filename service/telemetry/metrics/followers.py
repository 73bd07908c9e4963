"""Metrics that copy numbers of other objects, so that those need not know Prometheus.

Not a custom `Collector`: its samples are not in the files that several processes share (see `shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Labels = tuple[str, ...]


class FollowingCounter:
    """A counter that is set to a total. A total that fell started again at 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._counter = Counter(name, text, labels, registry=registry)
        self._seen: dict[Labels, float] = {}

    def follow(self, value: float, *labels: str) -> None:
        seen = self._seen.get(labels, 0.0)
        child = self._counter.labels(*labels) if labels else self._counter
        child.inc(value - seen if value >= seen else value)
        self._seen[labels] = value


class FollowingGauge:
    """A gauge. `of_all`: how the values of several processes that share their numbers become one."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        of_all: Literal["livesum", "livemax", "mostrecent"] = "livesum",
    ) -> None:
        self._gauge = Gauge(name, text, labels, registry=registry, multiprocess_mode=of_all)

    def follow(self, value: float, *labels: str) -> None:
        (self._gauge.labels(*labels) if labels else self._gauge).set(value)
