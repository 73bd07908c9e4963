"""Load test: what is offered and what comes of it, objectives kept and missed, and what it does to the processes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Panel, Section, choice, dashboard, latency, number, series
from deploy.grafana.generate.queries import quantile, rate, share, total

REQUESTS, TTFT, ITL = "nsm_http_requests_total", "nsm_time_to_first_token_seconds", "nsm_inter_token_latency_seconds"
BUCKETS = (
    "0.01",
    "0.025",
    "0.05",
    "0.1",
    "0.25",
    "0.5",
    "1.0",
    "2.5",
    "5.0",
    "10.0",
)  # objectives that are counted exactly
OVERLOAD = 'status=~"429|503"'
WORK = 'route!~"/metrics|/health.*"'
GOOD = "nsm_request_success_total"


def build() -> Dashboard:
    about = "The servers' side of a load test; the clients' side is in the load test's own report."
    sections = (
        Section("Now", _now()),
        Section("Offered and served", _throughput()),
        Section("Objectives", _objectives()),
        Section("Saturation", _saturation()),
        Section("Flat or rising", _growth()),
    )
    objectives = (
        choice("ttft", "First token within (s)", BUCKETS, "1.0"),
        choice("itl", "Next token within (s)", BUCKETS, "0.1"),
    )
    return dashboard("nsm-load-test", "NSM load test", about, sections, objectives)


def _within(histogram: str, variable: str) -> str:
    """Share of observations at or below the chosen bucket."""
    return share(rate(f"{histogram}_bucket", f'le="${variable}"'), rate(f"{histogram}_count"))


def _refused() -> str:
    return f"({rate(REQUESTS, OVERLOAD)} or vector(0))"


def _now() -> tuple[Panel, ...]:
    return (
        number("Offered", rate(REQUESTS, WORK), unit="reqps", about="HTTP requests a second, refused ones included."),
        number(
            "Refused",
            share(_refused(), rate(REQUESTS, WORK)),
            unit="percentunit",
            about="Share that was answered 429 or 503: overload is refused at once, not queued for ever.",
        ),
        number(
            "Under way", total("nsm_http_requests_in_flight"), unit="short", about="HTTP requests and detached turns."
        ),
        number("Tokens", rate("nsm_generation_tokens_total"), unit="short", about="Generated in a second."),
        number(
            "First token in time", _within(TTFT, "ttft"), unit="percentunit", about="Share within the objective above."
        ),
        number(
            "Next token in time", _within(ITL, "itl"), unit="percentunit", about="Share within the objective above."
        ),
    )


def _throughput() -> tuple[Panel, ...]:
    ended_well = rate(GOOD, 'finished_reason=~"stop|length"')
    return (
        series(
            "Offered, refused, done",
            {"offered": rate(REQUESTS, WORK), "refused": _refused(), "ended well": ended_well},
            unit="reqps",
            about="Offered and refused are HTTP requests, the last are generations.",
        ),
        series(
            "Tokens",
            {
                "generated": rate("nsm_generation_tokens_total"),
                "prompt, read": rate("nsm_tokens_computed_total"),
                "prompt, from a state": rate("nsm_tokens_resumed_total"),
            },
            unit="short",
            about="A second.",
        ),
        series(
            "Errors by code",
            {"{{code}}": rate("nsm_errors_total", by="code")},
            unit="reqps",
            about="Of answers, and of streams that ended in one.",
            is_stacked=True,
        ),
    )


def _objectives() -> tuple[Panel, ...]:
    return (
        series(
            "Tokens in time",
            {"first": _within(TTFT, "ttft"), "next": _within(ITL, "itl")},
            unit="percentunit",
            about="Share within the objectives that are chosen above.",
            top=1,
        ),
        latency(
            "Time to first token", TTFT, about="Arrival at the gateway to the first text handed to the connection."
        ),
        latency("Inter-token latency", ITL, about="Gap between two tokens of one request."),
        latency("Time per output token", "nsm_time_per_output_token_seconds", about="One value for each request."),
        latency("End to end", "nsm_e2e_request_latency_seconds", about="Arrival at the gateway to the end."),
        series(
            "Where time goes, p95",
            {
                "queue": quantile(0.95, "nsm_request_queue_time_seconds"),
                "prefill": quantile(0.95, "nsm_request_prefill_time_seconds"),
                "decode": quantile(0.95, "nsm_request_decode_time_seconds"),
                "lease": quantile(0.95, "nsm_lease_wait_seconds"),
                "commit": quantile(0.95, "nsm_state_commit_seconds"),
            },
            unit="s",
            about="95th percentile of each part; they do not add up to that of the whole.",
        ),
    )


def _saturation() -> tuple[Panel, ...]:
    return (
        series(
            "Requests in the engine",
            {
                "running": total("nsm_num_requests_running"),
                "waiting": total("nsm_num_requests_waiting"),
                "slots": total("nsm_max_slots"),
            },
            unit="short",
            about="Past the knee, waiting grows and running stays at the slots.",
        ),
        series(
            "Requests in a step",
            {"mean": share(rate("nsm_engine_step_rows_total"), rate("nsm_engine_steps_total"))},
            unit="short",
            about="Size of the batch, over the steps that were made.",
        ),
        series(
            "Time in steps",
            {"{{instance}}": rate("nsm_engine_step_seconds_total", by="instance")},
            unit="percentunit",
            about="Share of the time that the engine works, by gateway.",
            top=1,
        ),
    )


def _growth() -> tuple[Panel, ...]:
    def by_gateway(metric: str) -> dict[str, str]:
        return {"{{instance}}": total(metric, by="instance")}

    return (
        series(
            "Memory",
            by_gateway("nsm_process_resident_memory_bytes"),
            unit="bytes",
            about="Resident memory of each gateway.",
        ),
        series("Open files and sockets", by_gateway("nsm_process_open_fds"), unit="short", about="Of each gateway."),
        series(
            "CPU",
            {"{{instance}}": rate("nsm_process_cpu_seconds_total", by="instance")},
            unit="short",
            about="Cores that each gateway keeps busy.",
        ),
    )
