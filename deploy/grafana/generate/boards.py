"""Every panel of every dashboard: a table of title, expressions, unit and explanation."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Section, choice, dashboard, entry, heatmap, latency, number, series
from deploy.grafana.generate.queries import (
    CHOSEN,
    average,
    buckets,
    highest,
    lowest,
    mean,
    overall,
    quantile,
    rate,
    select,
    share,
    total,
    within,
)

REQUESTS, FINISHED, LEASE_LOST = "nsm_http_requests_total", "nsm_request_success_total", "nsm_lease_lost_total"
TTFT, ITL, E2E = "nsm_time_to_first_token_seconds", "nsm_inter_token_latency_seconds", "nsm_e2e_request_latency_seconds"
RESUMED, COMPUTED, TOKENS = "nsm_tokens_resumed_total", "nsm_tokens_computed_total", "nsm_generation_tokens_total"
COMMIT, FETCH = "nsm_state_commit_seconds", "nsm_state_fetch_seconds"
STEPS = "nsm_engine_steps_total"
FAILED = f"""({rate(REQUESTS, 'status=~"5.."')} or vector(0))"""
PROMPT_TOKENS = f"({rate(RESUMED)} + {rate(COMPUTED)})"
UNUSABLE = 'outcome=~"missing|corrupt|refused"'
LAYER = "layer {{layer}}"
VERSIONS = f'label_replace({select("nsm_model_info")}, "version", "$1", "fingerprint", "(.{{12}}).*")'
STATE_HITS, STATE_MISSES = rate("nsm_triton_state_hits_total"), rate("nsm_triton_state_misses_total")
WORKER_STEPS = "sum(rate(nsm_worker_steps_total[$__rate_interval]))"
WORKER_LATENCY = {
    name: f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket[$__rate_interval])))"
    for name, metric in (
        ("first token", "nsm_worker_time_to_first_token_seconds"),
        ("next token", "nsm_worker_inter_token_latency_seconds"),
        ("whole call", "nsm_worker_call_seconds"),
    )
}

ENERGY, CHARGED = "nsm_energy_joules_total", "nsm_energy_charged_joules_total"
MEASURED = 'method!="estimate"'
JOULES_PER_KWH = 3_600_000
PER_TOKEN = share(rate(ENERGY), rate(TOKENS))
RANGE_JOULES = f"sum(increase({select(ENERGY)}[$__range]))"
SAVED = share(f"{rate(RESUMED)} * {rate(CHARGED)}", f"({rate(COMPUTED)} + {rate(TOKENS)})")
ABOUT_ENERGY = (
    "Energy of the engines behind the chosen gateways. Each source names its method: a "
    "counter of the hardware, or an estimate from utilisation. Of gateways that share Triton servers choose one: "
    "each reports the servers' energy."
)

WORK = 'route!~"/metrics|/health.*"'
REFUSED = f"""({rate(REQUESTS, 'status=~"429|503"')} or vector(0))"""
BOUNDS = ("0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0")  # that are counted exactly
OBJECTIVES = (
    choice("ttft", "First token within (s)", BOUNDS, "1.0"),
    choice("itl", "Next token within (s)", BOUNDS, "0.1"),
)
BY_GATEWAY = "{{instance}}"


def boards() -> list[Dashboard]:
    """In the order of the files' names."""
    return [_overview(), _sessions(), _model(), _energy(), _load_test()]


# fmt: off
def _overview() -> Dashboard:
    return dashboard("nsm-overview", "NSM service overview",
              "Traffic, latency and load of the gateways that are chosen above.", [
        Section("Now", (
            number("Gateways up", f'sum(up{{job="nsm", {CHOSEN}}})', "short",
                "Gateways that Prometheus can read."),
            number("Requests", rate(REQUESTS), "reqps", "HTTP requests a second, of all kinds."),
            number("Server errors", share(FAILED, rate(REQUESTS)), "percentunit",
                "Share of HTTP requests that were answered with a status of 5xx.", limits=(0.001, 0.01)),
            number("Generated", rate("nsm_generation_tokens_total"), "short", "Tokens sampled a second."),
            number("First token, p95", quantile(0.95, TTFT), "s",
                "Arrival at the gateway to the first text handed to the client's connection.", limits=(1, 3)),
            number("Waiting", total("nsm_num_requests_waiting"), "short", "Requests in the queue for a slot.",
                limits=(1, 64)),
        )),
        Section("Traffic", (
            series("HTTP requests by status", {"{{status}}": rate(REQUESTS, by="status")}, "reqps",
                "499: the client left before the answer.", is_stacked=True),
            series("HTTP requests by route", {"{{method}} {{route}}": rate(REQUESTS, by="method, route")},
                "reqps", "Route templates, never paths as they were sent.", is_stacked=True),
            series("Generations by how they ended",
                {"{{finished_reason}}": rate("nsm_request_success_total", by="finished_reason")}, "reqps",
                "A body with n=2 and two prompts makes four.", is_stacked=True),
            series("Tokens", {"generated": rate("nsm_generation_tokens_total"),
                "prompt, read": rate("nsm_tokens_computed_total"),
                "prompt, from a state": rate("nsm_tokens_resumed_total")}, "short",
                "A second. What a stored state covers is not computed again."),
            series("Errors by code", {"{{code}}": rate("nsm_errors_total", by="code")}, "reqps",
                "Of answers, and of streams that ended in one.", is_stacked=True),
            series("Refusals", {"{{reason}}": rate("nsm_rejected_total", by="reason")}, "reqps",
                "For want of a valid API key, or for a limit of the tenant.", is_stacked=True),
            series("Length of requests", {"prompt": mean("nsm_request_prompt_tokens"),
                "allowed": mean("nsm_request_params_max_tokens"), "choices of a body": mean("nsm_request_params_n"),
                "generated": mean("nsm_request_generation_tokens")}, "short",
                "Mean tokens of a request; the prompt's include those of a resumed state.", is_log=True),
        )),
        Section("Latency", (
            latency("Time to first token", TTFT, "From the request's arrival at the gateway."),
            latency("Inter-token latency", ITL,
                "Gap between two tokens of one request, as they reach the gateway."),
            latency("End to end", E2E, "Arrival at the gateway to the end of the request."),
            latency("Queue", "nsm_request_queue_time_seconds", "From the engine's queue to a slot."),
            latency("Prefill", "nsm_request_prefill_time_seconds", "From the slot to the first token sampled."),
            latency("Time per output token", "nsm_time_per_output_token_seconds",
                "One value for each request: from its first token to its last, over the number after the first."),
            heatmap("Time to first token, spread", buckets(TTFT), "s",
                "Requests by how long they waited for it."),
            heatmap("Inter-token latency, spread", buckets(ITL), "s", "Tokens by the gap before them."),
        )),
        Section("Batch", (
            series("Requests in the engine", {"running": total("nsm_num_requests_running"),
                "waiting": total("nsm_num_requests_waiting"), "slots": total("nsm_max_slots")}, "short",
                "Running requests hold a slot of the state pool; the others wait for one."),
            series("Slots in use",
                {BY_GATEWAY: share(total("nsm_num_requests_running", by="instance"),
                                       total("nsm_max_slots", by="instance"))},
                "percentunit", "Share of the state pool's slots, by gateway.", top=1),
            series("Size of a step",
                {"requests": share(rate("nsm_engine_step_rows_total"), rate("nsm_engine_steps_total")),
                "tokens": share(rate("nsm_engine_step_tokens_total"), rate("nsm_engine_steps_total"))}, "short",
                "Mean of what the engine advances at a time."),
            series("Time of a step",
                {"mean": share(rate("nsm_engine_step_seconds_total"), rate("nsm_engine_steps_total"))}, "s",
                "Mean duration of a step of the engine."),
            series("Age of the heartbeat", {BY_GATEWAY: highest("nsm_engine_heartbeat_age_seconds", "instance")},
                "s", "Time since the engine began a step or woke; above 5 s new requests are refused.", top=1),
            series("Time in steps", {BY_GATEWAY: rate("nsm_engine_step_seconds_total", by="instance")},
                "percentunit", "Share of the time that the engine works, by gateway.", top=1),
            series("Drafts", {"times": rate("nsm_spec_decode_num_drafts_total"),
                "drafted": rate("nsm_spec_decode_num_draft_tokens_total"),
                "accepted": rate("nsm_spec_decode_num_accepted_tokens_total")}, "short",
                "How often a second, tokens that were drafted, and those of them that became output. None where "
                "many run."),
        )),
        Section("Processes", (
            series("CPU", {BY_GATEWAY: rate("nsm_process_cpu_seconds_total", by="instance")}, "short",
                "Cores that each gateway keeps busy."),
            series("Memory", {BY_GATEWAY: total("nsm_process_resident_memory_bytes", by="instance")}, "bytes",
                "Resident memory of each gateway."),
            series("Memory of states", {"state pool": total("nsm_state_pool_bytes"),
                "accelerator": total("nsm_device_memory_bytes")}, "bytes",
                "The accelerator's is all that the engine's process took; 0 on a CPU."),
            series("Open files and sockets", {BY_GATEWAY: total("nsm_process_open_fds", by="instance")},
                "short", "Of each gateway."),
            series("Under way", {BY_GATEWAY: total("nsm_http_requests_in_flight", by="instance")}, "short",
                "HTTP requests, and turns that go on without their client."),
            series("Threads", {BY_GATEWAY: total("nsm_process_threads", by="instance")}, "short",
                "Of each gateway."),
        )),
        Section("Batches, tuning and models", (
            series("Lines of batches", {"{{outcome}}": rate("nsm_batch_lines_total", by="outcome"),
                "gave way to a live request": rate("nsm_batch_lines_given_up_total")}, "ops",
                "Lines that ended, and those that gave their slot to a live request and run again."),
            series("Under way", {"lines of batches": total("nsm_batch_lines_running"),
                "fine-tuning jobs": total("nsm_fine_tuning_jobs_running")}, "short", "Now."),
            series("Fine-tuning jobs", {"{{status}}": rate("nsm_fine_tuning_jobs_total", by="status")}, "ops",
                "Jobs that ended, by status."),
            series("Models loaded", {"{{model_name}}": total("nsm_model_loaded", by="model_name")}, "short",
                "Gateways that have the model in memory; the first model is not counted."),
            series("Loads and unloads", {"{{model_name}} {{outcome}}":
                rate("nsm_model_loads_total", by="model_name, outcome"),
                "{{model_name}} unloaded": rate("nsm_model_unloads_total", by="model_name")}, "ops",
                "Models loaded on demand, and unloaded to make room for another."),
            latency("Loading a model", "nsm_model_load_seconds", "Waiting for room included."),
        )),
    ])


def _sessions() -> Dashboard:
    return dashboard("nsm-sessions", "NSM sessions and store",
              "Turns, stored states, stored prefixes and leases of the gateways that are chosen above.", [
        Section("Now", (
            number("Turns committed", rate(f"{COMMIT}_count"), "ops", "A second."),
            number("Prompt tokens not computed", share(rate(RESUMED), PROMPT_TOKENS), "percentunit",
                "Share of prompt tokens that a stored state covered."),
            number("States not as stored", f'({rate("nsm_session_resume_total", UNUSABLE)} or vector(0))', "ops",
                "Stored states that had to be made again from the log, or could not be used at all.",
                limits=(1e-09, 1)),
            number("Size of a state", mean("nsm_state_bytes"), "bytes", "Mean size of a committed snapshot."),
            number("Leases lost", rate("nsm_lease_lost_total"), "ops",
                "Turns whose lease went to another holder before their commit.", limits=(1e-09, 1)),
            number("Turns without client", total("nsm_turns_detached"), "short",
                "Turns that go on to their commit although their client has left."),
        )),
        Section("Resuming", (
            series("Stored states by outcome", {"{{outcome}}": rate("nsm_session_resume_total", by="outcome")},
                "ops",
                "hit: used as stored; missing, corrupt: made again from the log; miss: no such session, or a "
                "damaged log; refused: not this session's state, or of a model that is not served.",
                is_stacked=True),
            series("Where states came from", {"{{source}}": rate("nsm_state_source_total", by="source")}, "ops",
                "memory: the process had it; store: a snapshot; log: a snapshot, if there is one, and the log "
                "after it.",
                is_stacked=True),
            series("Tokens read again", {"tokens": rate("nsm_replayed_tokens_total")}, "short",
                "Tokens of logs that were read again because no state covered them."),
            series("Snapshots", {"{{outcome}}": rate("nsm_snapshots_total", by="outcome")}, "ops",
                "committed: with a turn; stored: after it; outdated: the session had moved on; dropped: too many "
                "waited; failed: the store could not.",
                is_stacked=True),
            series("States in memory", {"bytes": total("nsm_state_cache_bytes")}, "bytes",
                "States that wait in the gateways for the next turn of their session."),
            series("Snapshots given up", {"{{snapshots}}": rate("nsm_sessions_shed_total", by="snapshots")}, "ops",
                "Unused sessions that lost their older snapshots, or all of them; their logs stay."),
            series("Prompt tokens", {"from a state": rate(RESUMED), "read": rate(COMPUTED)}, "short",
                "A second. The first are what sessions and stored prefixes save.", is_stacked=True),
            series("Retries and resumed streams", {"turns given again": rate("nsm_turn_replay_total"),
                "streams read on": rate("nsm_stream_resume_total")}, "ops",
                "Retried turns that got the one begun or committed earlier; streams read on after a break."),
        )),
        Section("Store", (
            latency("Reading a session", FETCH, "From the store, its snapshot included."),
            latency("Committing a turn", COMMIT, "Log, snapshot and head, in one transaction."),
            series("Calls to the store, p95",
                {"{{operation}}": quantile(0.95, "nsm_store_operation_seconds", by="operation")}, "s",
                "By what was asked of it."),
            series("Calls by outcome", {"{{outcome}}": rate("nsm_store_operation_seconds_count", by="outcome")},
                "ops",
                "refused: by a rule, such as a busy session; failed: the store did not answer as it should.",
                is_stacked=True),
            series("Bytes moved", {"{{direction}}": rate("nsm_store_bytes_total", by="direction")}, "Bps",
                "Snapshots and logs, read from the store and written to it."),
            series("Bytes stored", {"{{tenant}}": highest("nsm_tenant_stored_bytes", "tenant")}, "bytes",
                "By tenant, by the store's own count.", is_stacked=True),
            series("Sessions", {"{{tenant}}": highest("nsm_tenant_sessions", "tenant")}, "short", "By tenant.",
                is_stacked=True),
            series("Room left",
                {"{{store}}": share(lowest("nsm_store_free_bytes", "store"),
                                    lowest("nsm_store_limit_bytes", "store"))},
                "percentunit", "Of the disk or of Redis' memory. Without any, new sessions are refused.", top=1),
            series("Connections to Redis", {BY_GATEWAY: total("nsm_redis_pool_in_use", by="instance")},
                "short", "Those with a command under way. Empty where sessions are in SQLite."),
            heatmap("Commits, spread", buckets(COMMIT), "s", "Commits by how long they took."),
            heatmap("Sizes of snapshots", buckets("nsm_state_bytes"), "bytes", "Committed snapshots by size."),
        )),
        Section("Prefixes of stateless prompts", (
            series("Where prompts started", {"{{outcome}}": rate("nsm_prefix_resume_total", by="outcome")}, "ops",
                "hit: from a stored state; miss: none fits; short: too few tokens; off: not wanted; corrupt: "
                "removed; unavailable: the store did not answer.",
                is_stacked=True),
            series("Tokens covered",
                {"share": share(rate("nsm_prefix_cache_hits_total"), rate("nsm_prefix_cache_queries_total"))},
                "percentunit", "Share of the tokens of these prompts that a stored state covered.", top=1),
            series("States kept", {"{{outcome}}": rate("nsm_prefix_saved_total", by="outcome")}, "ops",
                "other_ids: the answer's text has other ids than were sampled; dropped: too many at once.",
                is_stacked=True),
            latency("Looking for a beginning", "nsm_prefix_fetch_seconds", "In the store of prefixes."),
        )),
        Section("Leases, breaks and handovers", (
            latency("Asking for a lease", "nsm_lease_wait_seconds",
                "Until it was held or refused; the session comes with it."),
            series("Conflicts", {"session busy": rate("nsm_lease_busy_total"),
                "commits refused": rate("nsm_commit_conflict_total"),
                "leases lost": rate("nsm_lease_lost_total")}, "ops",
                "Somebody else held the session, it had moved on, or its lease had gone to another holder."),
            series("Turns that changed process", {"left to others": rate("nsm_turn_handover_total"),
                "taken over": rate("nsm_turn_takeover_total")}, "ops",
                "When a gateway stops, and when one is lost."),
            series("Turns without their client", {BY_GATEWAY: total("nsm_turns_detached", by="instance")},
                "short", "They go on to their commit."),
        )),
        Section("Gateways on Triton", (
            series("Triton servers", {"{{state}}": total("nsm_triton_servers", by="state")}, "short",
                "As the gateways see them. This row is empty where engines run in the gateways.",
                is_stacked=True),
            series("Failovers", {"servers lost": rate("nsm_triton_failovers_total")}, "ops",
                "Servers that requests lost, to go on with another."),
            series("States that were already there",
                {"share": share(STATE_HITS, f"({STATE_HITS} + {STATE_MISSES})")},
                "percentunit",
                "Turns that went to a server which still had their state, so that it was not sent.", top=1),
            series("States that workers keep", {"states": "sum(nsm_worker_kept_states)"}, "short",
                "For their next turn, in the memory of Triton's workers."),
            series("Their memory", {"kept": "sum(nsm_worker_kept_state_bytes)"}, "bytes",
                "Of the states that Triton's workers keep."),
            series("Calls of the workers by how they ended",
                {"{{outcome}}": "sum by (outcome) (rate(nsm_worker_calls_total[$__rate_interval]))"}, "ops",
                "From gateways and other clients: a finish reason, or the code of an error.", is_stacked=True),
            series("Latency in the workers, p95",
                WORKER_LATENCY,
                "s", "Of streams, and of all calls that ended well; without the way to the client."),
            series("Tokens of the workers", {
                name: f"sum(rate(nsm_worker_tokens_{name}_total[$__rate_interval]))"
                for name in ("generated", "computed", "resumed")
            }, "short", "A second. Computed are prompt tokens that were read, resumed those that a state covered."),
            series("Steps of the workers", {
                name: share(f"sum(rate(nsm_worker_step_{name}_total[$__rate_interval]))", WORKER_STEPS)
                for name in ("rows", "tokens")
            }, "short", "Mean requests and tokens of a step."),
            series("States asked for by id", {
                name: f"sum(rate(nsm_worker_{metric}_total[$__rate_interval]))"
                for name, metric in (("there", "state_hits"), ("not there", "state_misses"),
                                     ("given up for newer ones", "states_evicted"))
            }, "ops", "In the memory of Triton's workers."),
            series("Power of the workers", {"all": "sum(rate(nsm_worker_energy_joules_total[$__rate_interval]))"},
                "watt", "All sources together."),
            series("Slots of the workers", {"running": "sum(nsm_worker_requests_running)",
                "waiting": "sum(nsm_worker_requests_waiting)", "slots": "sum(nsm_worker_slots)"}, "short",
                "From Triton's own /metrics."),
        )),
    ])


def _model() -> Dashboard:
    return dashboard("nsm-model", "NSM model internals",
              "Routing and use of states by layer. On Triton servers the engine is elsewhere, and these "
              "are empty.", [
        Section("Now", (
            number("Models served", f'count(count by (fingerprint) ({select("nsm_model_info")}))', "short",
                "By fingerprint. More than one: an upgrade is under way."),
            number("Tokens sampled", rate("nsm_model_observed_tokens_total"), "short",
                "A second. The figures below were made of these."),
            number("Routing entropy", overall("nsm_routing_entropy"), "percentunit",
                "Mean over layers; 1: uniform."),
            number("States used per token", overall("nsm_states_used_per_token"), "short", "Mean over layers."),
            number("Write weight", overall("nsm_update_gate_openness"), "percentunit", "Mean over layers."),
            number("States in use", overall("nsm_state_utilisation"), "percentunit", "Mean over layers."),
        )),
        Section("Routing", (
            series("Routing entropy", {LAYER: average("nsm_routing_entropy", "layer")}, "percentunit",
                "Of a token's write weights over the slots of a head. 1: all are equal; near 0: one slot takes "
                "all.",
                top=1),
            series("Routing sparsity", {LAYER: average("nsm_routing_sparsity", "layer")}, "percentunit",
                "Share of slots that a token leaves alone: written to with a weight below a thousandth.", top=1),
            series("States used per token", {LAYER: average("nsm_states_used_per_token", "layer")}, "short",
                "Effective number of slots of a head that a token writes to: exp of the entropy in nats."),
            series("Openness of the update gate", {LAYER: average("nsm_update_gate_openness", "layer")},
                "percentunit", "Mean write weight."),
        )),
        Section("States", (
            series("Utilisation of states", {LAYER: average("nsm_state_utilisation", "layer")}, "percentunit",
                "Share of slots that are no longer where they started.", top=1),
            series("Slots in use", {LAYER: average("nsm_active_states", "layer")}, "short",
                "Of a head, on average; all of them where a layer neither allocates nor prunes."),
            series("Allocations", {LAYER: rate("nsm_state_allocations_total", by="layer")}, "ops",
                "Slots that came into use, as seen in samples.", is_stacked=True),
            series("Prunings", {LAYER: rate("nsm_state_prunings_total", by="layer")}, "ops",
                "Slots that went out of use, as seen in samples.", is_stacked=True),
            series("Memory of states", {"state pool": total("nsm_state_pool_bytes"),
                "accelerator": total("nsm_device_memory_bytes")}, "bytes",
                "The accelerator's is all that the engine's process took; 0 on a CPU."),
            series("Models served",
                {"{{model_name}} {{version}}": f"count by (model_name, version) ({VERSIONS})"}, "short",
                "Gateways by the model they serve, with the first digits of its fingerprint.", is_stacked=True),
        )),
    ])


def _energy() -> Dashboard:
    return dashboard("nsm-energy", "NSM energy and cost", ABOUT_ENERGY, [
        Section("Now", (
            number("Power", rate(ENERGY), "watt", "All sources together, idle times included."),
            number("Energy per generated token", PER_TOKEN, "joule", "Idle times included."),
            number("Energy", RANGE_JOULES, "joule", "Within the time range above."),
            number("Cost", f"{RANGE_JOULES} / {JOULES_PER_KWH} * $price", "short",
                "Of that energy, in the price's unit."),
            number("Charged to requests", share(rate(CHARGED), rate(ENERGY)), "percentunit",
                "Share of the energy that went into requests; the rest was used while nothing ran."),
            number("Measured", share(f"({rate(ENERGY, MEASURED)} or vector(0))", rate(ENERGY)), "percentunit",
                "Share of the energy that a counter of the hardware measured; the rest is an estimate."),
        )),
        Section("Power", (
            series("Power by source", {"{{source}} ({{method}})": rate(ENERGY, by="source, method")}, "watt",
                "The method says how it is known.", is_stacked=True),
            series("Power of GPUs",
                {"{{instance}} ({{method}})": rate(ENERGY, 'source="gpu"', by="instance, method")}, "watt",
                "nvml: the device's own counter of energy; nvml_power: its power over time. Empty without GPUs."),
            series("At work and idle", {"requests": rate(CHARGED),
                "idle": f"clamp_min({rate(ENERGY)} - {rate(CHARGED)}, 0)"}, "watt",
                "What requests were charged, and what was used beside them.", is_stacked=True),
        )),
        Section("Requests and tokens", (
            latency("Energy of a request", "nsm_request_energy_joules", "By its share of each batch.",
                unit="joule"),
            latency("Energy of a token, by request", "nsm_request_energy_per_token_joules",
                "Energy of each request over the tokens it generated.", unit="joule"),
            series("Energy of a generated token", {"all energy": PER_TOKEN,
                "charged to requests": share(rate(CHARGED), rate(TOKENS))}, "joule",
                "Over all requests; the first includes idle times."),
            series("Tokens per joule", {"generated": share(rate(TOKENS), rate(ENERGY))}, "short",
                "Idle times included."),
            series("Energy that stored states saved",
                {"an estimate": SAVED},
                "watt",
                "If reading the resumed tokens again had taken, for each, the mean energy of a processed one."),
        )),
        Section("Cost", (
            series("Cost of an hour", {"{{source}}": f'{rate(ENERGY, by="source")} / 1000 * $price'}, "short",
                "In the unit of the price that is typed in above.", is_stacked=True),
            series("Cost of a million generated tokens",
                {"all energy": f"{PER_TOKEN} * 1e6 / {JOULES_PER_KWH} * $price"}, "short",
                "In the unit of the price that is typed in above; idle times included."),
        )),
    ], [entry("price", "Price of a kWh", "0.30")])


def _load_test() -> Dashboard:
    return dashboard("nsm-load-test", "NSM load test",
              "The servers' side of a load test; the clients' side is in the load test's own report.", [
        Section("Now", (
            number("Offered", rate(REQUESTS, WORK), "reqps", "HTTP requests a second, refused ones included."),
            number("Refused", share(REFUSED, rate(REQUESTS, WORK)), "percentunit",
                "Share that was answered 429 or 503: overload is refused at once, not queued for ever."),
            number("Under way", total("nsm_http_requests_in_flight"), "short",
                "HTTP requests and detached turns."),
            number("Tokens", rate("nsm_generation_tokens_total"), "short", "Generated in a second."),
            number("First token in time", within(TTFT, "ttft"), "percentunit",
                "Share within the objective above."),
            number("Next token in time", within(ITL, "itl"), "percentunit", "Share within the objective above."),
        )),
        Section("Offered and served", (
            series("Offered, refused, done", {"offered": rate(REQUESTS, WORK), "refused": REFUSED,
                "ended well": rate(FINISHED, 'finished_reason=~"stop|length"')}, "reqps",
                "Offered and refused are HTTP requests, the last are generations."),
            series("Tokens", {"generated": rate("nsm_generation_tokens_total"),
                "prompt, read": rate("nsm_tokens_computed_total"),
                "prompt, from a state": rate("nsm_tokens_resumed_total")}, "short", "A second."),
            series("Errors by code", {"{{code}}": rate("nsm_errors_total", by="code")}, "reqps",
                "Of answers, and of streams that ended in one.", is_stacked=True),
        )),
        Section("Objectives", (
            series("Tokens in time", {"first": within(TTFT, "ttft"), "next": within(ITL, "itl")}, "percentunit",
                "Share within the objectives that are chosen above.", top=1),
            latency("Time to first token", TTFT,
                "Arrival at the gateway to the first text handed to the connection."),
            latency("Inter-token latency", ITL, "Gap between two tokens of one request."),
            latency("Time per output token", "nsm_time_per_output_token_seconds", "One value for each request."),
            latency("End to end", "nsm_e2e_request_latency_seconds", "Arrival at the gateway to the end."),
            series("Where time goes, p95", {"queue": quantile(0.95, "nsm_request_queue_time_seconds"),
                "prefill": quantile(0.95, "nsm_request_prefill_time_seconds"),
                "decode": quantile(0.95, "nsm_request_decode_time_seconds"),
                "lease": quantile(0.95, "nsm_lease_wait_seconds"),
                "commit": quantile(0.95, "nsm_state_commit_seconds")}, "s",
                "95th percentile of each part; they do not add up to that of the whole."),
        )),
        Section("Saturation", (
            series("Requests in the engine", {"running": total("nsm_num_requests_running"),
                "waiting": total("nsm_num_requests_waiting"), "slots": total("nsm_max_slots")}, "short",
                "Past the knee, waiting grows and running stays at the slots."),
            series("Requests in a step",
                {"mean": share(rate("nsm_engine_step_rows_total"), rate("nsm_engine_steps_total"))}, "short",
                "Size of the batch, over the steps that were made."),
            series("Time in steps", {BY_GATEWAY: rate("nsm_engine_step_seconds_total", by="instance")},
                "percentunit", "Share of the time that the engine works, by gateway.", top=1),
        )),
        Section("Flat or rising", (
            series("Memory", {BY_GATEWAY: total("nsm_process_resident_memory_bytes", by="instance")}, "bytes",
                "Resident memory of each gateway."),
            series("Open files and sockets", {BY_GATEWAY: total("nsm_process_open_fds", by="instance")}, "short",
                "Of each gateway."),
            series("CPU", {BY_GATEWAY: rate("nsm_process_cpu_seconds_total", by="instance")}, "short",
                "Cores that each gateway keeps busy."),
        )),
    ], OBJECTIVES)
