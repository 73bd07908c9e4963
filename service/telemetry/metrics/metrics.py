"""Every Prometheus metric of the gateway. Names and units follow vLLM's, with our own prefix: see docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from service.backends.base import DeviceStats, InferenceBackend, UpstreamStats
from service.telemetry.metrics import shared
from service.telemetry.metrics.batches import BatchMetrics
from service.telemetry.metrics.engine import (
    DeviceMetrics,
    EnergyMetrics,
    EngineMetrics,
    ModelMetrics,
    UpstreamMetrics,
)
from service.telemetry.metrics.followers import FollowingGauge
from service.telemetry.metrics.models import ModelLoadMetrics
from service.telemetry.metrics.prefixes import PrefixMetrics
from service.telemetry.metrics.process import ProcessMetrics
from service.telemetry.metrics.requests import RequestMetrics
from service.telemetry.metrics.sessions import SessionMetrics
from service.telemetry.metrics.tuning import TuningMetrics


class Metrics:
    """The metrics of one application, in a registry of its own.

    Callers record events in `requests`, `sessions`, `prefixes` and `tuning`. The other metrics are copied from other
    objects before each exposition.
    """

    def __init__(self, backend: InferenceBackend, *, num_in_flight: Callable[[], int] = lambda: 0) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Refresher(self.refresh))  # first: the others are asked after it
        self.requests = RequestMetrics(registry)
        self.sessions = SessionMetrics(registry)
        self.prefixes = PrefixMetrics(registry)
        self.tuning = TuningMetrics(registry)
        self._backend = backend
        self._num_in_flight = num_in_flight
        self._engine = EngineMetrics(registry)
        self._model = ModelMetrics(registry)
        self._energy = EnergyMetrics(registry)
        self._process = ProcessMetrics(registry)
        self.models = ModelLoadMetrics(registry)
        self.batches = BatchMetrics(registry)
        self._others: list[Callable[[], None]] = []

    def watch_redis_pool(self, num_in_use: Callable[[], int]) -> None:
        """For servers whose sessions are in Redis."""
        name, text = "nsm_redis_pool_in_use", "Connections to Redis with a command under way."
        gauge = FollowingGauge(name, text, registry=self.registry)
        self._others.append(lambda: gauge.follow(num_in_use()))

    def watch_devices(self, stats: Callable[[], list[DeviceStats]]) -> None:
        """For servers with an engine on each of several devices."""
        devices = DeviceMetrics(self.registry)
        self._others.append(lambda: devices.follow(stats()))

    def watch_upstreams(self, stats: Callable[[], UpstreamStats]) -> None:
        """For servers whose engines are on others."""
        upstreams = UpstreamMetrics(self.registry)
        self._others.append(lambda: upstreams.follow(stats()))

    def refresh(self) -> None:
        """Copies the numbers of other objects, and shows other processes what this one has gathered."""
        self.requests.refresh()
        stats, model = self._backend.stats(), self._backend.model
        self._engine.follow(stats, model=(model.name, model.fingerprint, model.numerics))
        self._model.follow(stats)
        self._energy.follow(stats)
        self._process.follow(num_in_flight=self._num_in_flight())
        for follow in self._others:
            follow()

    def render(self) -> bytes:
        """The exposition text: of this process, or of all that share their numbers."""
        return shared.render(self.registry, self.refresh)


class _Refresher(Collector):
    """Has no metric of its own."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh

    def describe(self) -> Iterator[Metric]:
        """Empty, because the backend may not have started at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        return iter(())
