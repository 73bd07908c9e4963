"""Model internals: what the routed states of the layers do, from tokens that the engine samples now and then."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Panel, Section, dashboard, number, series
from deploy.grafana.generate.queries import average, rate, select, total

LAYER = "layer {{layer}}"
VERSIONS = f'label_replace({select("nsm_model_info")}, "version", "$1", "fingerprint", "(.{{12}}).*")'


def build() -> Dashboard:
    about = "Routing and use of states by layer. On Triton servers the engine is elsewhere, and these are empty."
    sections = (Section("Now", _now()), Section("Routing", _routing()), Section("States", _states()))
    return dashboard("nsm-model", "NSM model internals", about, sections)


def _now() -> tuple[Panel, ...]:
    return (
        number(
            "Models served",
            f"count(count by (fingerprint) ({select('nsm_model_info')}))",
            unit="short",
            about="By fingerprint. More than one: an upgrade is under way.",
        ),
        number(
            "Tokens sampled",
            rate("nsm_model_observed_tokens_total"),
            unit="short",
            about="A second. The figures below were made of these.",
        ),
        number(
            "Routing entropy", _of_all("nsm_routing_entropy"), unit="percentunit", about="Mean over layers; 1: uniform."
        ),
        number("States used per token", _of_all("nsm_states_used_per_token"), unit="short", about="Mean over layers."),
        number("Write weight", _of_all("nsm_update_gate_openness"), unit="percentunit", about="Mean over layers."),
        number("States in use", _of_all("nsm_state_utilisation"), unit="percentunit", about="Mean over layers."),
    )


def _of_all(metric: str) -> str:
    return f"avg({select(metric)})"


def _routing() -> tuple[Panel, ...]:
    return (
        series(
            "Routing entropy",
            {LAYER: average("nsm_routing_entropy", "layer")},
            unit="percentunit",
            about="Of a token's write weights over the slots of a head. 1: all are equal; near 0: one slot takes all.",
            top=1,
        ),
        series(
            "Routing sparsity",
            {LAYER: average("nsm_routing_sparsity", "layer")},
            unit="percentunit",
            about="Share of slots that a token leaves alone: written to with a weight below a thousandth.",
            top=1,
        ),
        series(
            "States used per token",
            {LAYER: average("nsm_states_used_per_token", "layer")},
            unit="short",
            about="Effective number of slots of a head that a token writes to: exp of the entropy in nats.",
        ),
        series(
            "Openness of the update gate",
            {LAYER: average("nsm_update_gate_openness", "layer")},
            unit="percentunit",
            about="Mean write weight.",
        ),
    )


def _states() -> tuple[Panel, ...]:
    return (
        series(
            "Utilisation of states",
            {LAYER: average("nsm_state_utilisation", "layer")},
            unit="percentunit",
            about="Share of slots that are no longer where they started.",
            top=1,
        ),
        series(
            "Slots in use",
            {LAYER: average("nsm_active_states", "layer")},
            unit="short",
            about="Of a head, on average; all of them where a layer neither allocates nor prunes.",
        ),
        series(
            "Allocations",
            {LAYER: rate("nsm_state_allocations_total", by="layer")},
            unit="ops",
            about="Slots that came into use, as seen in samples.",
            is_stacked=True,
        ),
        series(
            "Prunings",
            {LAYER: rate("nsm_state_prunings_total", by="layer")},
            unit="ops",
            about="Slots that went out of use, as seen in samples.",
            is_stacked=True,
        ),
        series(
            "Memory of states",
            {"state pool": total("nsm_state_pool_bytes"), "accelerator": total("nsm_device_memory_bytes")},
            unit="bytes",
            about="The accelerator's is all that the engine's process took; 0 on a CPU.",
        ),
        series(
            "Models served",
            {"{{model_name}} {{version}}": f"count by (model_name, version) ({VERSIONS})"},
            unit="short",
            about="Gateways by the model they serve, with the first digits of its fingerprint.",
            is_stacked=True,
        ),
    )
