"""The engine: its requests, its steps and its model."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry

from nsm_core.stats import EngineStats
from service.backends.base import DeviceStats, UpstreamStats
from service.telemetry.metrics.followers import FollowingCounter, FollowingGauge

# name -> (text, field of EngineStats)
GAUGES = {
    "nsm_num_requests_running": ("Requests that hold a slot.", "num_running"),
    "nsm_num_requests_waiting": ("Requests in the queue.", "num_waiting"),
    "nsm_max_slots": ("Rows of the state pool.", "max_slots"),
    "nsm_state_pool_bytes": ("Memory of the state pool.", "state_pool_bytes"),
    "nsm_device_memory_bytes": (
        "Memory of the accelerator that the engine's process has taken; 0 without one.",
        "device_memory_bytes",
    ),
    "nsm_engine_heartbeat_age_seconds": (
        "Time since the engine's thread began its present step, or woke last; since a Triton server last answered.",
        "heartbeat_age_s",
    ),
}
OF_ALL: dict[str, Literal["livemax"]] = {"heartbeat_age_s": "livemax"}
COUNTERS = {
    "nsm_tokens_computed_total": ("Prompt tokens the model read.", "tokens_computed"),
    "nsm_tokens_resumed_total": ("Prompt tokens covered by a resumed state.", "tokens_resumed"),
    "nsm_generation_tokens_total": ("Tokens sampled.", "tokens_generated"),
    "nsm_spec_decode_num_drafts_total": ("Times that tokens were drafted for a request.", "num_drafts"),
    "nsm_spec_decode_num_draft_tokens_total": ("Tokens drafted.", "num_draft_tokens"),
    "nsm_spec_decode_num_accepted_tokens_total": (
        "Tokens drafted that became output.",
        "num_accepted_tokens",
    ),
    "nsm_engine_steps_total": ("Steps of the engine.", "num_steps"),
    "nsm_engine_step_failures_total": ("Steps that failed, and ended their requests.", "num_failed_steps"),
    "nsm_engine_slow_steps_total": ("Steps that took more than a second.", "num_slow_steps"),
    "nsm_engine_step_seconds_total": ("Time spent in steps.", "step_seconds"),
    "nsm_engine_step_rows_total": ("Requests that a step advanced, over all steps.", "step_rows"),
    "nsm_engine_step_tokens_total": ("Tokens that a step read, over all steps.", "step_tokens"),
}


class EngineMetrics:
    """Brought up to date by `follow`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = [
            (field, FollowingGauge(name, text, registry=registry, of_all=OF_ALL.get(field, "livesum")))
            for name, (text, field) in GAUGES.items()
        ]
        self._counters = [
            (field, FollowingCounter(name, text, registry=registry)) for name, (text, field) in COUNTERS.items()
        ]
        self._prompt_tokens = FollowingCounter(
            "nsm_prompt_tokens_total", "Prompt tokens, read or covered by a resumed state.", registry=registry
        )
        self._info = FollowingGauge(
            "nsm_model_info",
            "The served model.",
            ["model_name", "fingerprint", "numerics"],
            registry=registry,
            of_all="livemax",
        )

    def follow(self, stats: EngineStats, *, model: tuple[str, str, str]) -> None:
        """`model`: its name, fingerprint and numerics class."""
        for field, gauge in self._gauges:
            gauge.follow(getattr(stats, field))
        for field, counter in self._counters:
            counter.follow(getattr(stats, field))
        self._prompt_tokens.follow(stats.tokens_computed + stats.tokens_resumed)
        self._info.follow(1, *model)


class ModelMetrics:
    """What the model's states are doing, from tokens that the engine samples now and then; none on Triton servers,
    which have metrics of their own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> FollowingGauge:
            return FollowingGauge(f"nsm_{name}", text, ["layer"], registry=registry, of_all="mostrecent")

        def counter(name: str, text: str) -> FollowingCounter:
            return FollowingCounter(f"nsm_{name}_total", text, ["layer"], registry=registry)

        self._gauges = {
            "entropy": gauge(
                "routing_entropy", "Entropy of a token's write weights over the slots of a head; 1: all are equal."
            ),
            "sparsity": gauge(
                "routing_sparsity", "Share of slots that a token writes to with a weight below a thousandth."
            ),
            "states_per_token": gauge("states_used_per_token", "Effective number of slots of a head a token writes."),
            "openness": gauge("update_gate_openness", "Mean write weight."),
            "utilisation": gauge("state_utilisation", "Share of slots that are not where they started."),
            "num_active": gauge("active_states", "Slots of a head that are in use, on average."),
        }
        self._counters = {
            "num_allocated": counter("state_allocations", "Slots that came into use, as seen in samples."),
            "num_pruned": counter("state_prunings", "Slots that went out of use, as seen in samples."),
        }
        self._observed = FollowingCounter(
            "nsm_model_observed_tokens_total", "Tokens that the figures on routing were made of.", registry=registry
        )

    def follow(self, stats: EngineStats) -> None:
        self._observed.follow(stats.num_observed)
        for layer in stats.layers:
            for field, gauge in self._gauges.items():
                gauge.follow(getattr(layer, field), layer.layer)
            for field, counter in self._counters.items():
                counter.follow(getattr(layer, field), layer.layer)


class EnergyMetrics:
    """Joules by source and method."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["source", "method"]
        self._all = FollowingCounter(
            "nsm_energy_joules_total",
            "Energy since the engine started, idle times included, by source and by method.",
            labels,
            registry=registry,
        )
        self._requests = FollowingCounter(
            "nsm_energy_charged_joules_total",
            "Of these joules, those charged to requests.",
            labels,
            registry=registry,
        )

    def follow(self, stats: EngineStats) -> None:
        for counter, uses in ((self._all, stats.energy), (self._requests, stats.request_energy)):
            for use in uses:
                counter.follow(use.joules, use.source, use.method)


class DeviceMetrics:
    """The engines of a backend on several devices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["engine", "device"]
        self._up = FollowingGauge(
            "nsm_engine_up",
            "Whether the engine of a device takes requests.",
            labels,
            registry=registry,
            of_all="livemax",
        )
        self._requests = FollowingGauge(
            "nsm_engine_requests", "Requests of the engine of a device.", labels, registry=registry, of_all="livemax"
        )

    def follow(self, stats: list[DeviceStats]) -> None:
        for one in stats:
            self._up.follow(int(one.is_up), str(one.engine), one.device)
            self._requests.follow(one.num_requests, str(one.engine), one.device)


class UpstreamMetrics:
    """The Triton servers of a backend."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._servers = FollowingGauge(
            "nsm_triton_servers", "Triton servers of this gateway.", ["state"], registry=registry
        )
        self._failovers = FollowingCounter(
            "nsm_triton_failovers_total", "Lost servers whose requests continued on another.", registry=registry
        )
        self._hits = FollowingCounter(
            "nsm_triton_state_hits_total", "Turns whose state was on the server they went to.", registry=registry
        )
        self._misses = FollowingCounter(
            "nsm_triton_state_misses_total", "Turns whose state was sent along.", registry=registry
        )

    def follow(self, stats: UpstreamStats) -> None:
        self._servers.follow(stats.num_up, "up")
        self._servers.follow(stats.num_down, "down")
        self._failovers.follow(stats.num_failovers)
        self._hits.follow(stats.num_state_hits)
        self._misses.follow(stats.num_state_misses)
