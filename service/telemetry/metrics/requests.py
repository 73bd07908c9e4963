"""Requests: their latencies, sizes, ends and refusals.

A "request" is one call to the engine: a body with n=2 and two prompts makes four. Intervals are differences of
`time.monotonic()` readings of one process.
"""

from __future__ import annotations

import functools
import time
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from nsm_core.engine.request import Finished, Timings
from service.telemetry.metrics.buckets import CHOICES, JOULES, SECONDS, TOKENS
from service.telemetry.metrics.fast_histogram import RepeatedHistogram, repeated_histogram

EndReason = Literal["stop", "length", "abort", "abort_before_first_token", "error"]
Rejection = Literal["invalid_api_key", "rate_limit", "concurrency_limit", "session_quota", "byte_quota"]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMetrics:
    """The gateway's requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms: list[RepeatedHistogram] = []
        self._register_latencies(registry)
        self._register_sizes(registry)
        self._register_ends(registry)

    def _register_latencies(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str) -> RepeatedHistogram:
            return self._repeated(f"nsm_{name}_seconds", text, buckets=SECONDS, registry=registry)

        self.time_to_first_token = seconds(
            "time_to_first_token",
            "Arrival at the gateway to the first text handed to the client's connection; without streaming, to the "
            "first text that reached the gateway. One sample for each request that delivered at least one token.",
        )
        self.inter_token_latency = seconds(
            "inter_token_latency",
            "Gap between two tokens of one request, as they reach the gateway; those of one event have no gap.",
        )
        self.time_per_output_token = seconds(
            "time_per_output_token",
            "From the first to the last token of a request, over the number of those after the first; one sample for "
            "each request that ended well with two tokens or more.",
        )
        self.e2e_latency = seconds("e2e_request_latency", "Arrival at the gateway to the end.")
        self._queue = seconds("request_queue_time", "From the engine's queue to a slot.")
        self._prefill = seconds("request_prefill_time", "From the slot to the first token sampled.")
        self._decode = seconds("request_decode_time", "From the first token sampled to the end.")

    def _register_sizes(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> RepeatedHistogram:
            return self._repeated(f"nsm_request_{name}", text, buckets=buckets, registry=registry)

        self._prompt_tokens = histogram(
            "prompt_tokens", "Tokens each request stood on, those of a resumed state included.", TOKENS
        )
        self._generation_tokens = histogram("generation_tokens", "Tokens each request sampled.", TOKENS)
        self._params_n = histogram("params_n", "n of each body.", CHOICES)
        self._params_max_tokens = histogram("params_max_tokens", "max_tokens of each body.", TOKENS)
        self._energy = histogram("energy_joules", "Energy of each request, all sources together.", JOULES)
        self._energy_per_token = histogram(
            "energy_per_token_joules", "Energy of each request over the tokens it sampled.", JOULES
        )

    def _register_ends(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nsm_{name}", text, labels, registry=registry)

        self._success = counter(
            "request_success_total",
            "Requests that ended, by reason; abort_before_first_token: cancelled before anything was delivered.",
            "finished_reason",
        )
        # each is there from the start, also one that never comes
        self._success_of = {reason: self._success.labels(reason) for reason in get_args(EndReason)}
        self._http_requests = counter(
            "http_requests_total",
            "HTTP requests by route template and status; 499: the client left first.",
            "method", "route", "status",
        )  # fmt: skip
        self._http_requests_of = functools.cache(self._http_requests.labels)
        self._errors = counter(
            "errors_total", "HTTP requests whose answer was an error, or whose stream ended in one, by its code.",
            "code",
        )  # fmt: skip
        self._rejected = counter(
            "rejected_total",
            "Requests refused without a valid API key or for a limit of their tenant, by reason.",
            "reason",
        )
        for rejection in get_args(Rejection):
            self._rejected.labels(rejection)

    def _repeated(
        self, name: str, text: str, *, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> RepeatedHistogram:
        histogram = repeated_histogram(name, text, buckets=buckets, registry=registry)
        self._histograms.append(histogram)
        return histogram

    def refresh(self) -> None:
        """Before each exposition."""
        for histogram in self._histograms:
            histogram.refresh()

    def start(self, *, arrival: float) -> RequestRecord:
        """For every request that the engine admitted; `arrival` is a `time.monotonic()` reading."""
        return RequestRecord(self, arrival)

    def body_accepted(self, *, n: int, max_tokens: int) -> None:
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def http_answered(self, *, method: str, route: str, status: int, error: str | None) -> None:
        """`route` is a template of ours, never a path as it was sent; `error` a code of `service.web.errors`."""
        self._http_requests_of(method if method in METHODS else "other", route, str(status)).inc()
        if error is not None:
            self._errors.labels(error).inc()

    def rejected(self, reason: Rejection) -> None:
        self._rejected.labels(reason).inc()

    def ended(self, reason: EndReason, finished: Finished | None) -> None:
        """Once for each request. `finished`: the engine's last event; None if nobody waited for it."""
        self._success_of[reason].inc()
        if finished is None:
            return
        if finished.prompt_tokens:
            self._prompt_tokens.observe(finished.prompt_tokens)
            self._generation_tokens.observe(finished.completion_tokens)
        if finished.timings is not None:
            self._time_spent(finished.timings)
        joules = sum(use.joules for use in finished.energy)
        if joules:
            self._energy.observe(joules)
            self._energy_per_token.observe(joules / max(1, finished.completion_tokens))

    def _time_spent(self, timings: Timings) -> None:
        self._queue.observe(timings.queue_s)
        if timings.prefill_s is None:
            return
        self._prefill.observe(timings.prefill_s)
        self._decode.observe(timings.decode_s)


class RequestRecord:
    """The clock of one request. Only the first call of `finish` counts."""

    __slots__ = (
        *("_arrival", "_first_token_at", "_has_delivered", "_has_ended", "_last_token_at", "_metrics"),
        "_num_tokens",
    )

    def __init__(self, metrics: RequestMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_tokens = 0
        self._first_token_at = self._last_token_at = 0.0
        self._has_delivered = False
        self._has_ended = False

    def token(self) -> None:
        """A token reached the gateway."""
        now = time.monotonic()
        if self._num_tokens:
            self._metrics.inter_token_latency.observe(now - self._last_token_at)
        else:
            self._first_token_at = now
        self._num_tokens += 1
        self._last_token_at = now

    def tokens(self, number: int) -> None:
        """So many tokens reached the gateway together, after the first one."""
        now = time.monotonic()
        gaps = self._metrics.inter_token_latency
        gaps.observe(now - self._last_token_at)
        if number > 1:
            gaps.observe(0.0, number - 1)
        self._num_tokens += number
        self._last_token_at = now

    def delivered(self, at: float | None = None) -> None:
        """Text was handed to the client's connection; only the first call counts. `at` defaults to now."""
        if not self._has_delivered:
            self._has_delivered = True
            self._metrics.time_to_first_token.observe((time.monotonic() if at is None else at) - self._arrival)

    def finish(self, reason: Literal["stop", "length", "abort", "error"], finished: Finished | None = None) -> None:
        """The request ended. Without the engine's own account its sizes and times are not sampled."""
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.e2e_latency.observe(time.monotonic() - self._arrival)
        if self._num_tokens > 1 and reason in ("stop", "length"):
            decode_s = self._last_token_at - self._first_token_at
            self._metrics.time_per_output_token.observe(decode_s / (self._num_tokens - 1))
        is_early = reason == "abort" and not self._has_delivered
        self._metrics.ended("abort_before_first_token" if is_early else reason, finished)
