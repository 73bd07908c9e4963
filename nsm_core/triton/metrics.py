"""The worker's figures as Triton's custom metrics, at Triton's own /metrics."""

from __future__ import annotations

from typing import Any

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


class TritonMetrics:
    """`pb_utils`: the module `triton_python_backend_utils`. `labels` tell the instances of a model apart."""

    def __init__(self, pb_utils: Any, labels: dict[str, str]) -> None:
        kinds = pb_utils.MetricFamily
        self._families = []  # a metric lives as long as its family
        self._metrics: dict[str, Any] = {}
        self._published = dict.fromkeys([*GAUGES, *COUNTERS], 0.0)
        for kind, table in ((kinds.GAUGE, GAUGES), (kinds.COUNTER, COUNTERS)):
            for name, (description, _) in table.items():
                family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
                self._families.append(family)
                self._metrics[name] = family.Metric(labels=labels)

    def publish(self, status: WorkerStatus) -> None:
        """Each metric that changed costs a round trip through shared memory."""
        for name, (_, source) in (GAUGES | COUNTERS).items():
            part, _, field = source.partition(".")
            value = float(getattr(getattr(status, part), field))
            change = value - self._published[name]
            if change and name in GAUGES:
                self._metrics[name].set(value)
            elif change:
                self._metrics[name].increment(change)
            self._published[name] = value
