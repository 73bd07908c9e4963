"""Metrics of what a machine without GPUs and without Triton servers does not have.

This is not the product. It stands in for a gateway whose models run on a GPU in Triton servers, and for the /metrics of
such a server, so that the panels of these are executed on numbers too; all else that the tests of the dashboards see
comes from a real server. The numbers only have to rise. A test compares the names with those of
`service/telemetry/metrics` and `nsm_core/triton/metrics.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

WATTS = 400.0
# name -> value
GAUGES = {
    "nsm_worker_kept_states": 3.0,
    "nsm_worker_kept_state_bytes": 3e6,
    "nsm_worker_requests_running": 2.0,
    "nsm_worker_requests_waiting": 1.0,
    "nsm_worker_slots": 16.0,
}
# name -> increase in a second
COUNTERS = {
    "nsm_worker_steps": 10.0,
    "nsm_worker_step_rows": 20.0,
    "nsm_worker_step_tokens": 40.0,
    "nsm_worker_energy_joules": 300.0,
    "nsm_worker_tokens_generated": 20.0,
    "nsm_worker_tokens_computed": 20.0,
    "nsm_worker_tokens_resumed": 60.0,
    "nsm_worker_state_hits": 5.0,
    "nsm_worker_state_misses": 1.0,
    "nsm_worker_states_evicted": 0.5,
    "nsm_triton_failovers": 0.1,
    "nsm_triton_state_hits": 5.0,
    "nsm_triton_state_misses": 1.0,
}


CALLS = "nsm_worker_calls"  # counter, by outcome
HISTOGRAMS = (
    "nsm_worker_time_to_first_token_seconds",
    "nsm_worker_inter_token_latency_seconds",
    "nsm_worker_call_seconds",
)


class AbsentHardware(Collector):
    """What it shows rises with time."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        elapsed = time.monotonic() - self._start
        for name, value in GAUGES.items():
            yield GaugeMetricFamily(name, "A stand-in.", value)
        for name, per_s in COUNTERS.items():
            yield CounterMetricFamily(name, "A stand-in.", per_s * elapsed)
        calls = CounterMetricFamily(CALLS, "A stand-in.", labels=["outcome"])
        calls.add_metric(["length"], elapsed)
        yield calls
        for name in HISTOGRAMS:
            buckets = [("0.1", elapsed), ("1.0", 2 * elapsed), ("+Inf", 2 * elapsed)]
            yield HistogramMetricFamily(name, "A stand-in.", buckets=buckets, sum_value=elapsed)
        servers = GaugeMetricFamily("nsm_triton_servers", "A stand-in.", labels=["state"])
        servers.add_metric(["up"], 2)
        servers.add_metric(["down"], 0)
        yield servers
        energy = CounterMetricFamily("nsm_energy_joules", "A stand-in.", labels=["source", "method"])
        energy.add_metric(["gpu", "nvml"], WATTS * elapsed)
        yield energy


@contextlib.contextmanager
def absent_hardware() -> Iterator[str]:
    """Its host:port."""
    registry = CollectorRegistry()
    registry.register(AbsentHardware())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
