"""Service overview: is it well, how much does it do, how fast."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Panel, Section, dashboard, heatmap, latency, number, series
from deploy.grafana.generate.queries import CHOSEN, buckets, mean, quantile, rate, share, total

REQUESTS, FAILED = "nsm_http_requests_total", 'status=~"5.."'
TTFT, ITL, E2E = "nsm_time_to_first_token_seconds", "nsm_inter_token_latency_seconds", "nsm_e2e_request_latency_seconds"


def build() -> Dashboard:
    about = "Traffic, latency and load of the gateways that are chosen above."
    sections = (
        Section("Now", _now()),
        Section("Traffic", _traffic()),
        Section("Latency", _latency()),
        Section("Batch", _batch()),
        Section("Processes", _processes()),
    )
    return dashboard("nsm-overview", "NSM service overview", about, sections)


def _now() -> tuple[Panel, ...]:
    failed = f"({rate(REQUESTS, FAILED)} or vector(0))"
    return (
        number(
            "Gateways up", f'sum(up{{job="nsm", {CHOSEN}}})', unit="short", about="Gateways that Prometheus can read."
        ),
        number("Requests", rate(REQUESTS), unit="reqps", about="HTTP requests a second, of all kinds."),
        number(
            "Server errors",
            share(failed, rate(REQUESTS)),
            unit="percentunit",
            about="Share of HTTP requests that were answered with a status of 5xx.",
            limits=(0.001, 0.01),
        ),
        number("Generated", rate("nsm_generation_tokens_total"), unit="short", about="Tokens sampled a second."),
        number(
            "First token, p95",
            quantile(0.95, TTFT),
            unit="s",
            about="Arrival at the gateway to the first text handed to the client's connection.",
            limits=(1, 3),
        ),
        number(
            "Waiting",
            total("nsm_num_requests_waiting"),
            unit="short",
            about="Requests in the queue for a slot.",
            limits=(1, 64),
        ),
    )


def _traffic() -> tuple[Panel, ...]:
    return (
        series(
            "HTTP requests by status",
            {"{{status}}": rate(REQUESTS, by="status")},
            unit="reqps",
            about="499: the client left before the answer.",
            is_stacked=True,
        ),
        series(
            "HTTP requests by route",
            {"{{method}} {{route}}": rate(REQUESTS, by="method, route")},
            unit="reqps",
            about="Route templates, never paths as they were sent.",
            is_stacked=True,
        ),
        series(
            "Generations by how they ended",
            {"{{finished_reason}}": rate("nsm_request_success_total", by="finished_reason")},
            unit="reqps",
            about="A body with n=2 and two prompts makes four.",
            is_stacked=True,
        ),
        series(
            "Tokens",
            {
                "generated": rate("nsm_generation_tokens_total"),
                "prompt, read": rate("nsm_tokens_computed_total"),
                "prompt, from a state": rate("nsm_tokens_resumed_total"),
            },
            unit="short",
            about="A second. What a stored state covers is not computed again.",
        ),
        series(
            "Errors by code",
            {"{{code}}": rate("nsm_errors_total", by="code")},
            unit="reqps",
            about="Of answers, and of streams that ended in one.",
            is_stacked=True,
        ),
        series(
            "Refusals",
            {"{{reason}}": rate("nsm_rejected_total", by="reason")},
            unit="reqps",
            about="For want of a valid API key, or for a limit of the tenant.",
            is_stacked=True,
        ),
        series(
            "Length of requests",
            {"prompt": mean("nsm_request_prompt_tokens"), "generated": mean("nsm_request_generation_tokens")},
            unit="short",
            about="Mean tokens of a request; the prompt's include those of a resumed state.",
            is_log=True,
        ),
    )


def _latency() -> tuple[Panel, ...]:
    return (
        latency("Time to first token", TTFT, about="From the request's arrival at the gateway."),
        latency("Inter-token latency", ITL, about="Gap between two tokens of one request, as they reach the gateway."),
        latency("End to end", E2E, about="Arrival at the gateway to the end of the request."),
        latency("Queue", "nsm_request_queue_time_seconds", about="From the engine's queue to a slot."),
        latency("Prefill", "nsm_request_prefill_time_seconds", about="From the slot to the first token sampled."),
        latency(
            "Time per output token",
            "nsm_time_per_output_token_seconds",
            about="One value for each request: from its first token to its last, over the number after the first.",
        ),
        heatmap(
            "Time to first token, spread", buckets(TTFT), unit="s", about="Requests by how long they waited for it."
        ),
        heatmap("Inter-token latency, spread", buckets(ITL), unit="s", about="Tokens by the gap before them."),
    )


def _batch() -> tuple[Panel, ...]:
    return (
        series(
            "Requests in the engine",
            {
                "running": total("nsm_num_requests_running"),
                "waiting": total("nsm_num_requests_waiting"),
                "slots": total("nsm_max_slots"),
            },
            unit="short",
            about="Running requests hold a slot of the state pool; the others wait for one.",
        ),
        series(
            "Slots in use",
            {
                "{{instance}}": share(
                    total("nsm_num_requests_running", by="instance"), total("nsm_max_slots", by="instance")
                )
            },
            unit="percentunit",
            about="Share of the state pool's slots, by gateway.",
            top=1,
        ),
        series(
            "Size of a step",
            {
                "requests": share(rate("nsm_engine_step_rows_total"), rate("nsm_engine_steps_total")),
                "tokens": share(rate("nsm_engine_step_tokens_total"), rate("nsm_engine_steps_total")),
            },
            unit="short",
            about="Mean of what the engine advances at a time.",
        ),
        series(
            "Time of a step",
            {"mean": share(rate("nsm_engine_step_seconds_total"), rate("nsm_engine_steps_total"))},
            unit="s",
            about="Mean duration of a step of the engine.",
        ),
        series(
            "Time in steps",
            {"{{instance}}": rate("nsm_engine_step_seconds_total", by="instance")},
            unit="percentunit",
            about="Share of the time that the engine works, by gateway.",
            top=1,
        ),
        series(
            "Drafts",
            {
                "drafted": rate("nsm_spec_decode_num_draft_tokens_total"),
                "accepted": rate("nsm_spec_decode_num_accepted_tokens_total"),
            },
            unit="short",
            about="Tokens a second that were drafted, and those of them that became output. None where many run.",
        ),
    )


def _processes() -> tuple[Panel, ...]:
    return (
        series(
            "CPU",
            {"{{instance}}": rate("nsm_process_cpu_seconds_total", by="instance")},
            unit="short",
            about="Cores that each gateway keeps busy.",
        ),
        series(
            "Memory",
            {"{{instance}}": total("nsm_process_resident_memory_bytes", by="instance")},
            unit="bytes",
            about="Resident memory of each gateway.",
        ),
        series(
            "Memory of states",
            {"state pool": total("nsm_state_pool_bytes"), "accelerator": total("nsm_device_memory_bytes")},
            unit="bytes",
            about="The accelerator's is all that the engine's process took; 0 on a CPU.",
        ),
        series(
            "Open files and sockets",
            {"{{instance}}": total("nsm_process_open_fds", by="instance")},
            unit="short",
            about="Of each gateway.",
        ),
        series(
            "Under way",
            {"{{instance}}": total("nsm_http_requests_in_flight", by="instance")},
            unit="short",
            about="HTTP requests, and turns that go on without their client.",
        ),
        series(
            "Threads",
            {"{{instance}}": total("nsm_process_threads", by="instance")},
            unit="short",
            about="Of each gateway.",
        ),
    )
