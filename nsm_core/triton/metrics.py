"""The worker's figures as Triton's custom metrics, at Triton's own /metrics."""

from __future__ import annotations

from typing import Any

from nsm_core.triton.call_stats import CallStats, Histogram
from nsm_core.wire.description import WorkerStatus

# name -> (description, where in the status); counters rise for ever
GAUGES = {
    "nsm_worker_requests_running": ("Requests that hold a slot", "engine.num_running"),
    "nsm_worker_requests_waiting": ("Requests in the queue", "engine.num_waiting"),
    "nsm_worker_slots": ("Rows of the state pool", "engine.max_slots"),
    "nsm_worker_kept_states": ("States that wait for their next turn", "states.num_states"),
    "nsm_worker_kept_state_bytes": ("Bytes of the states that wait for their next turn", "states.num_bytes"),
}
COUNTERS = {
    "nsm_worker_steps_total": ("Steps of the engine", "engine.num_steps"),
    "nsm_worker_step_rows_total": ("Requests that a step advanced, over all steps", "engine.step_rows"),
    "nsm_worker_step_tokens_total": ("Tokens that a step read, over all steps", "engine.step_tokens"),
    "nsm_worker_energy_joules_total": ("Energy since the engine started, all sources together", "engine.joules"),
    "nsm_worker_tokens_computed_total": ("Prompt tokens that the model read", "engine.tokens_computed"),
    "nsm_worker_tokens_resumed_total": ("Prompt tokens covered by a resumed state", "engine.tokens_resumed"),
    "nsm_worker_tokens_generated_total": ("Tokens sampled", "engine.tokens_generated"),
    "nsm_worker_state_hits_total": ("States asked for by id that were kept here", "states.num_hits"),
    "nsm_worker_state_misses_total": ("States asked for by id that were not", "states.num_misses"),
    "nsm_worker_states_evicted_total": ("States given up for newer ones", "states.num_evicted"),
}


OUTCOMES = ("nsm_worker_calls_total", "Calls for tokens by how they ended: a finish reason, or the code of an error")
# Triton's own histograms take one observation at a time, a round trip each; these are counters with a label `le`
HISTOGRAMS = {
    "nsm_worker_time_to_first_token_seconds": ("Arrival to the first answer with tokens, of streams", "first_token"),
    "nsm_worker_inter_token_latency_seconds": ("Gap before each further token of a stream", "gaps"),
    "nsm_worker_call_seconds": ("Arrival to the last answer, of calls that ended well", "whole"),
}
Key = tuple[str, str]  # a metric's name, and the value of the label that its family has beside the instance's


class TritonMetrics:
    """`pb_utils`: the module `triton_python_backend_utils`. `labels` tell the instances of a model apart."""

    def __init__(self, pb_utils: Any, labels: dict[str, str]) -> None:
        self._pb_utils = pb_utils
        self._labels = labels
        self._families: dict[str, Any] = {}  # a metric lives as long as its family
        self._metrics: dict[Key, Any] = {}
        self._published: dict[Key, float] = {}

    def publish(self, status: WorkerStatus, calls: CallStats) -> None:
        """Each metric that changed costs a round trip through shared memory."""
        for name, (description, source) in (GAUGES | COUNTERS).items():
            part, _, field = source.partition(".")
            self._follow(name, description, getattr(getattr(status, part), field))
        name, description = OUTCOMES
        for outcome, count in calls.outcomes().items():
            self._follow(name, description, count, outcome=outcome)
        for name, (description, source) in HISTOGRAMS.items():
            self._follow_histogram(name, description, getattr(calls, source))

    def _follow_histogram(self, name: str, description: str, histogram: Histogram) -> None:
        count = 0
        for bound, count in histogram.cumulative():
            self._follow(f"{name}_bucket", description, count, le=bound)
        self._follow(f"{name}_count", description, count)
        self._follow(f"{name}_sum", description, histogram.total)

    def _follow(self, name: str, description: str, value: float, **more: str) -> None:
        """Brings one metric to `value`; those that are no gauges only rise. It begins at 0 when first followed."""
        key = (name, "".join(more.values()))
        if key not in self._metrics:
            self._metrics[key] = self._family(name, description).Metric(labels={**self._labels, **more})
            self._published[key] = 0.0
        change = float(value) - self._published[key]
        if change and name in GAUGES:
            self._metrics[key].set(float(value))
        elif change:
            self._metrics[key].increment(change)
        self._published[key] = float(value)

    def _family(self, name: str, description: str) -> Any:
        if name not in self._families:
            kinds = self._pb_utils.MetricFamily
            kind = kinds.GAUGE if name in GAUGES else kinds.COUNTER
            self._families[name] = kinds(name=name, description=description, kind=kind)
        return self._families[name]
