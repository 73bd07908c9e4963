"""Every Prometheus metric of the gateway. Names and units follow vLLM's, with our own prefix.

A "request" is one call to the engine: a body with n=2 and two prompts makes four. Intervals are differences of
`time.monotonic()` readings of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.backends.base import InferenceBackend, UpstreamStats

# 1 ms to 10 minutes
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
BYTES = (2**10, 2**14, 2**16, 2**18, 2**20, 2**21, 2**22, 2**23, 2**24, 2**26, 2**28)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)

# hit: used as stored; missing, corrupt, fingerprint_mismatch: made again from the log; miss: no such session, or a log
# that is damaged as well; refused: not this session's state, or of a model with another tokenizer
Outcome = Literal["hit", "missing", "corrupt", "fingerprint_mismatch", "miss", "refused"]
# hit: started from a stored state; miss: none fits; short: too few tokens; off: not wanted; corrupt: not used, removed;
# unavailable: the store did not answer
PrefixOutcome = Literal["hit", "miss", "short", "off", "corrupt", "unavailable"]
# other_ids: the answer's text has other ids than were sampled; dropped: too many at once, or the store rests
PrefixKept = Literal["stored", "other_ids", "dropped", "failed"]
EndReason = Literal["stop", "length", "abort", "abort_before_first_token", "error"]
Rejection = Literal["invalid_api_key", "rate_limit", "concurrency_limit", "session_quota", "byte_quota"]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, backend: InferenceBackend) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(backend))
        self._register_requests()
        self._register_sessions()
        self._register_prefixes()

    def watch_redis_pool(self, num_in_use: Callable[[], int]) -> None:
        """For servers whose sessions are in Redis."""
        name, what = "nsm_redis_pool_in_use", "Connections to Redis with a command under way."
        Gauge(name, what, registry=self.registry).set_function(num_in_use)

    def watch_upstreams(self, stats: Callable[[], UpstreamStats]) -> None:
        """For servers whose engines are on others."""
        self.registry.register(UpstreamCollector(stats))

    def _register_requests(self) -> None:
        registry = self.registry
        self._time_to_first_token = Histogram(
            "nsm_time_to_first_token_seconds",
            "Arrival at the gateway to the first text handed to the client's connection; without streaming, to the "
            "first text that reached the gateway. One sample for each request that delivered at least one token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._inter_token_latency = Histogram(
            "nsm_inter_token_latency_seconds",
            "Gap between two tokens of one request, as they reach the gateway.",
            buckets=SECONDS,
            registry=registry,
        )
        self._e2e_latency = Histogram(
            "nsm_e2e_request_latency_seconds", "Arrival at the gateway to the end.", buckets=SECONDS, registry=registry
        )
        self._prompt_tokens = Histogram(
            "nsm_request_prompt_tokens",
            "Tokens each request stood on, those of a resumed state included.",
            buckets=TOKENS,
            registry=registry,
        )
        self._generation_tokens = Histogram(
            "nsm_request_generation_tokens", "Tokens each request sampled.", buckets=TOKENS, registry=registry
        )
        self._params_n = Histogram("nsm_request_params_n", "n of each body.", buckets=CHOICES, registry=registry)
        self._params_max_tokens = Histogram(
            "nsm_request_params_max_tokens", "max_tokens of each body.", buckets=TOKENS, registry=registry
        )
        self._success = Counter(
            "nsm_request_success_total",
            "Requests that ended, by reason; abort_before_first_token: cancelled before anything was delivered.",
            ["finished_reason"],
            registry=registry,
        )
        self._http_requests = Counter(
            "nsm_http_requests_total",
            "HTTP requests by route template and status; 499: the client left first.",
            ["method", "route", "status"],
            registry=registry,
        )

        self._rejected = Counter(
            "nsm_rejected_total",
            "Requests refused for want of a valid API key or for a limit of their tenant, by reason.",
            ["reason"],
            registry=registry,
        )

    def _register_sessions(self) -> None:
        registry = self.registry
        self._session_resume = Counter(
            "nsm_session_resume_total", "Stored states asked for, by outcome.", ["outcome"], registry=registry
        )
        self._state_fetch = Histogram(
            "nsm_state_fetch_seconds", "Reading a session from the store.", buckets=SECONDS, registry=registry
        )
        self._state_commit = Histogram(
            "nsm_state_commit_seconds", "Committing a turn to the store.", buckets=SECONDS, registry=registry
        )
        self._state_bytes = Histogram(
            "nsm_state_bytes", "Size of each committed snapshot.", buckets=BYTES, registry=registry
        )
        self._commit_conflict = Counter(
            "nsm_commit_conflict_total", "Commits refused because the session had moved on.", registry=registry
        )
        self._lease_lost = Counter(
            "nsm_lock_lost_total", "Turns whose lease went to another holder before their commit.", registry=registry
        )
        self._turn_replay = Counter(
            "nsm_turn_replay_total",
            "Retries that were given the turn that was begun, or committed, at an earlier try.",
            registry=registry,
        )
        self._stream_resume = Counter(
            "nsm_stream_resume_total", "Streams that were read on after a break.", registry=registry
        )
        self._turn_handover = Counter(
            "nsm_turn_handover_total", "Turns that this process left to others when it stopped.", registry=registry
        )
        self._turn_takeover = Counter(
            "nsm_turn_takeover_total", "Turns of lost processes that went on in this one.", registry=registry
        )
        self._detached = Gauge("nsm_turns_detached", "Turns that go on without their client.", registry=registry)

    def _register_prefixes(self) -> None:
        registry = self.registry
        self._prefix_resume = Counter(
            "nsm_prefix_resume_total", "Stateless prompts by where they started from.", ["outcome"], registry=registry
        )
        for outcome in get_args(PrefixOutcome):  # each is there from the start, also one that never comes
            self._prefix_resume.labels(outcome)
        self._prefix_queries = Counter(
            "nsm_prefix_cache_queries_total", "Tokens of prompts that a stored beginning was looked for.",
            registry=registry,
        )  # fmt: skip
        self._prefix_hits = Counter(
            "nsm_prefix_cache_hits_total", "Tokens of these prompts that a stored state covered.", registry=registry
        )
        self._prefix_fetch = Histogram(
            "nsm_prefix_fetch_seconds", "Looking for a stored beginning.", buckets=SECONDS, registry=registry
        )
        self._prefix_kept = Counter(
            "nsm_prefix_kept_total", "States of stateless requests, by what became of them.", ["outcome"],
            registry=registry,
        )  # fmt: skip

    def start_request(self, *, arrival: float) -> RequestRecord:
        """For every request that the engine admitted; `arrival` is a `time.monotonic()` reading."""
        return RequestRecord(self, arrival)

    def body_accepted(self, *, n: int, max_tokens: int) -> None:
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def http_request(self, *, method: str, route: str, status: int) -> None:
        """`route` is a template of ours, never a path as it was sent."""
        self._http_requests.labels(method if method in METHODS else "other", route, str(status)).inc()

    def rejected(self, reason: Rejection) -> None:
        self._rejected.labels(reason).inc()

    def session_resume(self, outcome: Outcome) -> None:
        self._session_resume.labels(outcome).inc()

    def state_fetched(self, seconds: float) -> None:
        self._state_fetch.observe(seconds)

    def state_committed(self, seconds: float, *, num_bytes: int) -> None:
        self._state_commit.observe(seconds)
        self._state_bytes.observe(num_bytes)

    def prefix_resume(self, outcome: PrefixOutcome) -> None:
        self._prefix_resume.labels(outcome).inc()

    def prefix_looked_up(self, seconds: float, *, num_tokens: int, num_resumed: int) -> None:
        self._prefix_fetch.observe(seconds)
        self._prefix_queries.inc(num_tokens)
        self._prefix_hits.inc(num_resumed)

    def prefix_kept(self, outcome: PrefixKept) -> None:
        self._prefix_kept.labels(outcome).inc()

    def commit_conflict(self) -> None:
        self._commit_conflict.inc()

    def lease_lost(self) -> None:
        self._lease_lost.inc()

    def turn_replayed(self) -> None:
        self._turn_replay.inc()

    def stream_resumed(self) -> None:
        self._stream_resume.inc()

    def turn_handed_over(self) -> None:
        self._turn_handover.inc()

    def turn_taken_over(self) -> None:
        self._turn_takeover.inc()

    def turn_detached(self, change: Literal[1, -1]) -> None:
        """+1 when a turn's client leaves, -1 when that turn ends."""
        self._detached.inc(change)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class RequestRecord:
    """The clock of one request. `finish` counts once, whoever calls it first."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_token_at: float | None = None
        self._has_delivered = False
        self._has_ended = False

    def token(self) -> None:
        """A token reached the gateway."""
        now = time.monotonic()
        if self._last_token_at is not None:
            self._metrics._inter_token_latency.observe(now - self._last_token_at)
        self._last_token_at = now

    def delivered(self, at: float | None = None) -> None:
        """Text was handed to the client's connection; only the first call counts. `at` defaults to now."""
        if not self._has_delivered:
            self._has_delivered = True
            self._metrics._time_to_first_token.observe((time.monotonic() if at is None else at) - self._arrival)

    def finish(self, reason: Literal["stop", "length", "abort", "error"], *, prompt_tokens: int = 0,
               completion_tokens: int = 0) -> None:  # fmt: skip
        """The request ended. Token counts of zero are not sampled: the engine told none."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics = self._metrics
        is_early = reason == "abort" and not self._has_delivered
        label: EndReason = "abort_before_first_token" if is_early else reason
        metrics._success.labels(label).inc()
        metrics._e2e_latency.observe(time.monotonic() - self._arrival)
        if prompt_tokens:
            metrics._prompt_tokens.observe(prompt_tokens)
            metrics._generation_tokens.observe(completion_tokens)


class EngineCollector(Collector):
    """Reads the engine's own numbers when Prometheus asks."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend

    def describe(self) -> Iterator[Metric]:
        """Names are not checked at registration: the backend may not have started."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats, model = self._backend.stats(), self._backend.model
        info = GaugeMetricFamily(
            "nsm_model_info", "The served model.", labels=["model_name", "fingerprint", "numerics"]
        )
        info.add_metric([model.name, model.fingerprint, model.numerics], 1)
        yield info
        yield GaugeMetricFamily("nsm_num_requests_running", "Requests that hold a slot.", stats.num_running)
        yield GaugeMetricFamily("nsm_num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield GaugeMetricFamily("nsm_max_slots", "Rows of the state pool.", stats.max_slots)
        yield GaugeMetricFamily("nsm_state_pool_bytes", "Memory of the state pool.", stats.state_pool_bytes)
        prompt_tokens = stats.tokens_computed + stats.tokens_resumed
        for name, text, value in (
            ("nsm_prompt_tokens", "Prompt tokens, read or covered by a resumed state.", prompt_tokens),
            ("nsm_tokens_computed", "Prompt tokens the model read.", stats.tokens_computed),
            ("nsm_tokens_resumed", "Prompt tokens covered by a resumed state.", stats.tokens_resumed),
            ("nsm_generation_tokens", "Tokens sampled.", stats.tokens_generated),
            ("nsm_engine_steps", "Steps of the engine.", stats.num_steps),
            ("nsm_engine_step_seconds", "Time spent in steps.", stats.step_seconds),
        ):
            yield CounterMetricFamily(name, text, value)


class UpstreamCollector(Collector):
    """Reads what a backend knows of the servers it asks."""

    def __init__(self, stats: Callable[[], UpstreamStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        servers = GaugeMetricFamily("nsm_triton_servers", "Triton servers of this gateway.", labels=["state"])
        servers.add_metric(["up"], stats.num_up)
        servers.add_metric(["down"], stats.num_down)
        yield servers
        for name, text, value in (
            ("nsm_triton_failovers", "Servers that requests lost, to go on with another.", stats.num_failovers),
            ("nsm_triton_state_hits", "Turns whose state was on the server they went to.", stats.num_state_hits),
            ("nsm_triton_state_misses", "Turns whose state was sent along.", stats.num_state_misses),
        ):
            yield CounterMetricFamily(name, text, value)
