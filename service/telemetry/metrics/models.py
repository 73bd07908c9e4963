"""Metrics of models that are loaded on demand, by the name that clients use."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LOAD_BUCKETS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ModelLoadMetrics:
    """Models beside the first."""

    def __init__(self, registry: CollectorRegistry) -> None:
        label = ["model_name"]
        self._loaded = Gauge(
            "nsm_model_loaded", "1 while the model is loaded.", label, registry=registry, multiprocess_mode="livemax"
        )
        self._loads = Counter(
            "nsm_model_loads_total", "Models loaded on demand.", [*label, "outcome"], registry=registry
        )
        self._unloads = Counter("nsm_model_unloads_total", "Models unloaded for another one.", label, registry=registry)
        self._seconds = Histogram(
            "nsm_model_load_seconds",
            "Time to load a model, waiting for room included.",
            registry=registry,
            buckets=LOAD_BUCKETS_S,
        )

    def is_loaded(self, name: str, value: bool) -> None:
        self._loaded.labels(name).set(value)

    def ended(self, name: str, outcome: Literal["loaded", "failed"], seconds: float) -> None:
        self._loads.labels(name, outcome).inc()
        self._seconds.observe(seconds)

    def unloaded(self, name: str) -> None:
        self._unloads.labels(name).inc()
