"""Energy and cost: joules by source, by request and by token, and what they cost at the price that is typed in."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Panel, Section, dashboard, entry, latency, number, series
from deploy.grafana.generate.queries import rate, select, share

ALL, CHARGED, TOKENS = "nsm_energy_joules_total", "nsm_energy_charged_joules_total", "nsm_generation_tokens_total"
MEASURED = 'method!="estimate"'
JOULES_PER_KWH = 3_600_000
PER_TOKEN = share(rate(ALL), rate(TOKENS))


def build() -> Dashboard:
    about = (
        "Energy of the engines behind the chosen gateways. Each source tells by which method its joules are known: a "
        "counter of the hardware, or an estimate from utilisation. Of gateways that share Triton servers choose one: "
        "each reports the servers' energy."
    )
    sections = (
        Section("Now", _now()),
        Section("Power", _power()),
        Section("Requests and tokens", _work()),
        Section("Cost", _cost()),
    )
    price = entry("price", "Price of a kWh", "0.30")
    return dashboard("nsm-energy", "NSM energy and cost", about, sections, [price])


def _now() -> tuple[Panel, ...]:
    energy = f"sum(increase({select(ALL)}[$__range]))"
    return (
        number("Power", rate(ALL), unit="watt", about="All sources together, idle times included."),
        number("Energy per generated token", PER_TOKEN, unit="joule", about="Idle times included."),
        number("Energy", energy, unit="joule", about="Within the time range above."),
        number(
            "Cost", f"{energy} / {JOULES_PER_KWH} * $price", unit="short", about="Of that energy, in the price's unit."
        ),
        number(
            "Charged to requests",
            share(rate(CHARGED), rate(ALL)),
            unit="percentunit",
            about="Share of the energy that went into requests; the rest was used while nothing ran.",
        ),
        number(
            "Measured",
            share(f"({rate(ALL, MEASURED)} or vector(0))", rate(ALL)),
            unit="percentunit",
            about="Share of the energy that a counter of the hardware measured; the rest is an estimate.",
        ),
    )


def _power() -> tuple[Panel, ...]:
    return (
        series(
            "Power by source",
            {"{{source}} ({{method}})": rate(ALL, by="source, method")},
            unit="watt",
            about="The method says how it is known.",
            is_stacked=True,
        ),
        series(
            "Power of GPUs",
            {"{{instance}} ({{method}})": rate(ALL, 'source="gpu"', by="instance, method")},
            unit="watt",
            about="nvml: the device's own counter of energy; nvml_power: its power over time. Empty without GPUs.",
        ),
        series(
            "At work and idle",
            {"requests": rate(CHARGED), "idle": f"clamp_min({rate(ALL)} - {rate(CHARGED)}, 0)"},
            unit="watt",
            about="What requests were charged, and what was used beside them.",
            is_stacked=True,
        ),
    )


def _work() -> tuple[Panel, ...]:
    return (
        latency("Energy of a request", "nsm_request_energy_joules", unit="joule", about="By its share of each batch."),
        latency(
            "Energy of a token, by request",
            "nsm_request_energy_per_token_joules",
            unit="joule",
            about="Energy of each request over the tokens it generated.",
        ),
        series(
            "Energy of a generated token",
            {"all energy": PER_TOKEN, "charged to requests": share(rate(CHARGED), rate(TOKENS))},
            unit="joule",
            about="Over all requests; the first includes idle times.",
        ),
        series(
            "Tokens per joule",
            {"generated": share(rate(TOKENS), rate(ALL))},
            unit="short",
            about="Idle times included.",
        ),
        series(
            "Energy that stored states saved",
            {
                "an estimate": share(
                    f"{rate('nsm_tokens_resumed_total')} * {rate(CHARGED)}",
                    f"({rate('nsm_tokens_computed_total')} + {rate(TOKENS)})",
                )
            },
            unit="watt",
            about="If reading the resumed tokens again had taken, for each, the mean energy of a processed one.",
        ),
    )


def _cost() -> tuple[Panel, ...]:
    return (
        series(
            "Cost of an hour",
            {"{{source}}": f"{rate(ALL, by='source')} / 1000 * $price"},
            unit="short",
            about="In the unit of the price that is typed in above.",
            is_stacked=True,
        ),
        series(
            "Cost of a million generated tokens",
            {"all energy": f"{PER_TOKEN} * 1e6 / {JOULES_PER_KWH} * $price"},
            unit="short",
            about="In the unit of the price that is typed in above; idle times included.",
        ),
    )
