"""Metrics of batches."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Of the lines that this process runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge(
            "nsm_batch_lines_running",
            "Lines of batches under way.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._lines = Counter("nsm_batch_lines_total", "Lines of batches that ended.", ["outcome"], registry=registry)
        for outcome in ("completed", "failed"):  # both are there from the start, as rates need
            self._lines.labels(outcome)
        self._given_up = Counter(
            "nsm_batch_lines_given_up_total", "Lines that gave their slot to a live request.", registry=registry
        )

    def began(self) -> None:
        self._running.inc()

    def left(self) -> None:
        """It ended, or runs again later."""
        self._running.dec()

    def ended(self, *, is_failed: bool) -> None:
        self._lines.labels("failed" if is_failed else "completed").inc()

    def gave_way(self) -> None:
        self._given_up.inc()
