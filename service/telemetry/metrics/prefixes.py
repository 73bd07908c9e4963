"""Stored beginnings of stateless prompts."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from service.telemetry.metrics.buckets import SECONDS

# hit: started from a stored state; miss: none fits; short: too few tokens; off: not wanted; corrupt: not used, removed;
# unavailable: the store did not answer
PrefixOutcome = Literal["hit", "miss", "short", "off", "corrupt", "unavailable"]
# other_ids: the answer's text has other ids than were sampled; dropped: too many at once, or the store rests
PrefixSaved = Literal["stored", "other_ids", "dropped", "failed"]


class PrefixMetrics:
    """Starts of stateless requests from stored prefixes, and the states stored."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._resume = Counter(
            "nsm_prefix_resume_total", "Stateless prompts by where they started from.", ["outcome"], registry=registry
        )
        # each is there from the start, also one that never comes
        self._resume_of = {outcome: self._resume.labels(outcome) for outcome in get_args(PrefixOutcome)}
        self._queries = Counter(
            "nsm_prefix_cache_queries_total", "Tokens of prompts that a stored beginning was looked for.",
            registry=registry,
        )  # fmt: skip
        self._hits = Counter(
            "nsm_prefix_cache_hits_total", "Tokens of these prompts that a stored state covered.", registry=registry
        )
        self._fetch = Histogram(
            "nsm_prefix_fetch_seconds", "Looking for a stored beginning.", buckets=SECONDS, registry=registry
        )
        self._saved = Counter(
            "nsm_prefix_saved_total", "States of stateless requests, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip

    def resumed(self, outcome: PrefixOutcome) -> None:
        self._resume_of[outcome].inc()

    def looked_up(self, seconds: float, *, num_tokens: int, num_resumed: int) -> None:
        self._fetch.observe(seconds)
        self._queries.inc(num_tokens)
        self._hits.inc(num_resumed)

    def saved(self, outcome: PrefixSaved) -> None:
        self._saved.labels(outcome).inc()
