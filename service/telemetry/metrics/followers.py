"""Metrics that follow numbers kept elsewhere, so that those need not know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Labels = tuple[str, ...]


class FollowingCounter:
    """A counter that is told what it stands at. A number that fell began anew, from 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._counter = Counter(name, text, labels, registry=registry)
        self._seen: dict[Labels, float] = {}

    def follow(self, value: float, *labels: str) -> None:
        seen = self._seen.get(labels, 0.0)
        child = self._counter.labels(*labels) if labels else self._counter
        child.inc(value - seen if value >= seen else value)
        self._seen[labels] = value


class FollowingGauge:
    """A gauge. Of several processes that share their numbers, those that live add up, or the highest one counts."""

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
