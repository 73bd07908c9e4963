"""Sessions and store: what becomes of stored states, and what keeping them costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.generate.panels import Panel, Section, dashboard, heatmap, latency, number, series
from deploy.grafana.generate.queries import buckets, highest, lowest, mean, quantile, rate, share, total

RESUMED, COMPUTED = "nsm_tokens_resumed_total", "nsm_tokens_computed_total"
COMMIT, FETCH = "nsm_state_commit_seconds", "nsm_state_fetch_seconds"


def build() -> Dashboard:
    about = "Turns, stored states, stored prefixes and leases of the gateways that are chosen above."
    sections = (
        Section("Now", _now()),
        Section("Resuming", _resuming()),
        Section("Store", _store()),
        Section("Prefixes of stateless prompts", _prefixes()),
        Section("Leases, breaks and handovers", _breaks()),
        Section("Gateways on Triton", _triton()),
    )
    return dashboard("nsm-sessions", "NSM sessions and store", about, sections)


def _now() -> tuple[Panel, ...]:
    tokens = f"({rate(RESUMED)} + {rate(COMPUTED)})"
    bad = 'outcome=~"missing|corrupt|fingerprint_mismatch|refused"'
    return (
        number("Turns committed", rate(f"{COMMIT}_count"), unit="ops", about="A second."),
        number(
            "Prompt tokens not computed",
            share(rate(RESUMED), tokens),
            unit="percentunit",
            about="Share of prompt tokens that a stored state covered.",
        ),
        number(
            "States not as stored",
            f"({rate('nsm_session_resume_total', bad)} or vector(0))",
            unit="ops",
            about="Stored states that had to be made again from the log, or could not be used at all.",
            limits=(1e-9, 1),
        ),
        number("Size of a state", mean("nsm_state_bytes"), unit="bytes", about="Mean size of a committed snapshot."),
        number(
            "Leases lost",
            rate("nsm_lease_lost_total"),
            unit="ops",
            about="Turns whose lease went to another holder before their commit.",
            limits=(1e-9, 1),
        ),
        number(
            "Turns without client",
            total("nsm_turns_detached"),
            unit="short",
            about="Turns that go on to their commit although their client has left.",
        ),
    )


def _resuming() -> tuple[Panel, ...]:
    return (
        series(
            "Stored states by outcome",
            {"{{outcome}}": rate("nsm_session_resume_total", by="outcome")},
            unit="ops",
            about="hit: used as stored; missing, corrupt, fingerprint_mismatch: made again from the log; miss: no such "
            "session, or a damaged log; refused: not this session's state, or of a model with another tokenizer.",
            is_stacked=True,
        ),
        series(
            "Prompt tokens",
            {"from a state": rate(RESUMED), "read": rate(COMPUTED)},
            unit="short",
            about="A second. The first are what sessions and stored prefixes save.",
            is_stacked=True,
        ),
        series(
            "Retries and resumed streams",
            {
                "turns given again": rate("nsm_turn_replay_total"),
                "streams read on": rate("nsm_stream_resume_total"),
            },
            unit="ops",
            about="Retried turns that got the one begun or committed earlier; streams read on after a break.",
        ),
    )


def _store() -> tuple[Panel, ...]:
    return (
        latency("Reading a session", FETCH, about="From the store, its snapshot included."),
        latency("Committing a turn", COMMIT, about="Log, snapshot and head, in one transaction."),
        series(
            "Calls to the store, p95",
            {"{{operation}}": quantile(0.95, "nsm_store_operation_seconds", by="operation")},
            unit="s",
            about="By what was asked of it.",
        ),
        series(
            "Calls by outcome",
            {"{{outcome}}": rate("nsm_store_operation_seconds_count", by="outcome")},
            unit="ops",
            about="refused: by a rule, such as a busy session; failed: the store did not answer as it should.",
            is_stacked=True,
        ),
        series(
            "Bytes moved",
            {"{{direction}}": rate("nsm_store_bytes_total", by="direction")},
            unit="Bps",
            about="Snapshots and logs, read from the store and written to it.",
        ),
        series(
            "Bytes stored",
            {"{{tenant}}": highest("nsm_tenant_stored_bytes", "tenant")},
            unit="bytes",
            about="By tenant, by the store's own count.",
            is_stacked=True,
        ),
        series(
            "Sessions",
            {"{{tenant}}": highest("nsm_tenant_sessions", "tenant")},
            unit="short",
            about="By tenant.",
            is_stacked=True,
        ),
        series(
            "Room left",
            {"{{store}}": share(lowest("nsm_store_free_bytes", "store"), lowest("nsm_store_limit_bytes", "store"))},
            unit="percentunit",
            about="Of the disk or of Redis' memory. Without any, new sessions are refused.",
            top=1,
        ),
        series(
            "Connections to Redis",
            {"{{instance}}": total("nsm_redis_pool_in_use", by="instance")},
            unit="short",
            about="Those with a command under way. Empty where sessions are in SQLite.",
        ),
        heatmap("Commits, spread", buckets(COMMIT), unit="s", about="Commits by how long they took."),
        heatmap("Sizes of snapshots", buckets("nsm_state_bytes"), unit="bytes", about="Committed snapshots by size."),
    )


def _prefixes() -> tuple[Panel, ...]:
    return (
        series(
            "Where prompts started",
            {"{{outcome}}": rate("nsm_prefix_resume_total", by="outcome")},
            unit="ops",
            about="hit: from a stored state; miss: none fits; short: too few tokens; off: not wanted; corrupt: "
            "removed; unavailable: the store did not answer.",
            is_stacked=True,
        ),
        series(
            "Tokens covered",
            {"share": share(rate("nsm_prefix_cache_hits_total"), rate("nsm_prefix_cache_queries_total"))},
            unit="percentunit",
            about="Share of the tokens of these prompts that a stored state covered.",
            top=1,
        ),
        series(
            "States kept",
            {"{{outcome}}": rate("nsm_prefix_kept_total", by="outcome")},
            unit="ops",
            about="other_ids: the answer's text has other ids than were sampled; dropped: too many at once.",
            is_stacked=True,
        ),
        latency("Looking for a beginning", "nsm_prefix_fetch_seconds", about="In the store of prefixes."),
    )


def _breaks() -> tuple[Panel, ...]:
    return (
        latency(
            "Asking for a lease",
            "nsm_lease_wait_seconds",
            about="Until it was held or refused; the session comes with it.",
        ),
        series(
            "Conflicts",
            {
                "session busy": rate("nsm_lease_busy_total"),
                "commits refused": rate("nsm_commit_conflict_total"),
                "leases lost": rate("nsm_lease_lost_total"),
            },
            unit="ops",
            about="Somebody else held the session, it had moved on, or its lease had gone to another holder.",
        ),
        series(
            "Turns that changed process",
            {
                "left to others": rate("nsm_turn_handover_total"),
                "taken over": rate("nsm_turn_takeover_total"),
            },
            unit="ops",
            about="When a gateway stops, and when one is lost.",
        ),
        series(
            "Turns without their client",
            {"{{instance}}": total("nsm_turns_detached", by="instance")},
            unit="short",
            about="They go on to their commit.",
        ),
    )


def _triton() -> tuple[Panel, ...]:
    hits, misses = rate("nsm_triton_state_hits_total"), rate("nsm_triton_state_misses_total")
    return (
        series(
            "Triton servers",
            {"{{state}}": total("nsm_triton_servers", by="state")},
            unit="short",
            about="As the gateways see them. This row is empty where engines run in the gateways.",
            is_stacked=True,
        ),
        series(
            "Failovers",
            {"servers lost": rate("nsm_triton_failovers_total")},
            unit="ops",
            about="Servers that requests lost, to go on with another.",
        ),
        series(
            "States that were already there",
            {"share": share(hits, f"({hits} + {misses})")},
            unit="percentunit",
            about="Turns that went to a server which still had their state, so that it was not sent.",
            top=1,
        ),
        series(
            "States that workers keep",
            {"states": "sum(nsm_worker_kept_states)"},
            unit="short",
            about="For their next turn, in the memory of Triton's workers.",
        ),
        series(
            "Their memory",
            {"kept": "sum(nsm_worker_kept_state_bytes)"},
            unit="bytes",
            about="Of the states that Triton's workers keep.",
        ),
        series(
            "Calls of the workers by how they ended",
            {"{{outcome}}": "sum by (outcome) (rate(nsm_worker_calls_total[$__rate_interval]))"},
            unit="ops",
            about="From gateways and other clients: a finish reason, or the code of an error.",
            is_stacked=True,
        ),
        series(
            "Latency in the workers, p95",
            {
                name: f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket[$__rate_interval])))"
                for name, metric in (
                    ("first token", "nsm_worker_time_to_first_token_seconds"),
                    ("next token", "nsm_worker_inter_token_latency_seconds"),
                    ("whole call", "nsm_worker_call_seconds"),
                )
            },
            unit="s",
            about="Of streams, and of all calls that ended well; without the way to the client.",
        ),
        series(
            "Slots of the workers",
            {
                "running": "sum(nsm_worker_requests_running)",
                "waiting": "sum(nsm_worker_requests_waiting)",
                "slots": "sum(nsm_worker_slots)",
            },
            unit="short",
            about="As Triton's own /metrics tells them.",
        ),
    )
