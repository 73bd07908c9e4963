"""The process that supervises the others of a server with workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

PROCESSES = ("engine", "worker")


class SupervisorMetrics:
    """Make it inside `shared.sharing_in`: the workers answer for this process too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._restarts = Counter(
            "nsm_process_restarts_total",
            "Processes of this server that ended and were started again.",
            ["process"],
            registry=registry,
        )
        for process in PROCESSES:
            self._restarts.labels(process)

    def restarted(self, process: str) -> None:
        """`process`: one of PROCESSES."""
        self._restarts.labels(process).inc()
