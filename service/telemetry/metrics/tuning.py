"""Fine-tuning jobs."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

JobEnd = Literal["succeeded", "failed", "cancelled"]


class TuningMetrics:
    """Of the jobs that this process runs or has run."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "nsm_fine_tuning_jobs_total", "Fine-tuning jobs that have ended here.", ["status"], registry=registry
        )
        for status in get_args(JobEnd):
            self._ended.labels(status)
        self._running = Gauge(
            "nsm_fine_tuning_jobs_running", "Fine-tuning jobs that run here.", registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip

    def began(self) -> None:
        self._running.inc()

    def stopped(self) -> None:
        self._running.dec()

    def ended(self, status: JobEnd) -> None:
        self._ended.labels(status).inc()
