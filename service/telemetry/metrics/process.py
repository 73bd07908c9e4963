"""The gateway's process: memory, files, connections, CPU time."""

from __future__ import annotations

import psutil
from prometheus_client import CollectorRegistry

from service.telemetry.metrics.followers import FollowingCounter, FollowingGauge


class ProcessMetrics:
    """Brought up to date by `follow`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._process = psutil.Process()
        self._resident = FollowingGauge(
            "nsm_process_resident_memory_bytes", "Memory of the gateway's process.", registry=registry
        )
        self._files = FollowingGauge("nsm_process_open_fds", "Open files and sockets.", registry=registry)
        self._threads = FollowingGauge("nsm_process_threads", "Threads.", registry=registry)
        self._cpu = FollowingCounter("nsm_process_cpu_seconds_total", "Time on a CPU.", registry=registry)
        self._in_flight = FollowingGauge(
            "nsm_http_requests_in_flight", "HTTP requests and detached turns under way.", registry=registry
        )

    def follow(self, *, num_in_flight: int) -> None:
        with self._process.oneshot():
            cpu = self._process.cpu_times()
            self._resident.follow(self._process.memory_info().rss)
            self._threads.follow(self._process.num_threads())
            self._files.follow(self._process.num_fds())
        self._cpu.follow(cpu.user + cpu.system)
        self._in_flight.follow(num_in_flight)
