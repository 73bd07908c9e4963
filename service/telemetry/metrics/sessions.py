"""Sessions: states resumed and committed, leases, turns that move, and the store beneath them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.telemetry.metrics.buckets import BYTES, SECONDS
from service.telemetry.metrics.shared import is_shared

# files: no database, without a table, or removed, moved or replaced while open; lost_writes: a start without all that
# was acknowledged before; log: a session's tokens; snapshot: a state that was not made again, a head, another record
DamagedPart = Literal["files", "lost_writes", "log", "snapshot"]
# hit: used as stored; missing, corrupt: made again from the log; miss: no such session, or a log that is damaged as
# well; refused: not this session's state, or of a model that is not served
Outcome = Literal["hit", "missing", "corrupt", "miss", "refused"]
# memory: it was in this process; store: a snapshot of the head; log: tokens had to be read again
Source = Literal["memory", "store", "log"]
# committed: with its turn; stored: after it; outdated: the session had moved on; dropped: too many at once; failed
SnapshotEnd = Literal["committed", "stored", "outdated", "dropped", "failed"]
Shed = Literal["older", "all"]  # of a session's snapshots


class SessionMetrics:
    """Turns and the sessions in the store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._register_states(registry)
        self._register_turns(registry)
        self._register_store(registry)

    def _register_states(self, registry: CollectorRegistry) -> None:
        self._resume = Counter(
            "nsm_session_resume_total", "Stored states asked for, by outcome.", ["outcome"], registry=registry
        )
        for outcome in get_args(Outcome):  # from the start: an alert sees a counter rise, not that it comes to be
            self._resume.labels(outcome)
        self._state_source = Counter(
            "nsm_state_source_total", "Turns of sessions by where their state came from.", ["source"],
            registry=registry,
        )  # fmt: skip
        for source in get_args(Source):
            self._state_source.labels(source)
        self._replayed = Counter(
            "nsm_replayed_tokens_total", "Tokens of logs that turns read again.", registry=registry
        )
        self._snapshots = Counter(
            "nsm_snapshots_total", "States of sessions on their way to the store, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        for end in get_args(SnapshotEnd):
            self._snapshots.labels(end)
        self._shed = Counter(
            "nsm_sessions_shed_total", "Sessions that nobody used and that lost snapshots: the older ones, or all.",
            ["snapshots"], registry=registry,
        )  # fmt: skip
        for which in get_args(Shed):
            self._shed.labels(which)
        self._held_bytes = Gauge(
            "nsm_state_cache_bytes", "States of sessions that wait in memory for their next turn.", registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
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

    def _register_turns(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"nsm_{name}_total", text, registry=registry)

        self._lease_wait = Histogram(
            "nsm_lease_wait_seconds", "Asking for a session's lease until it was held or refused, with the read of "
            "the session.", buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._lease_busy = counter("lease_busy", "Leases refused because another holder had the session.")
        self._lease_lost = counter("lease_lost", "Turns whose lease went to another holder before their commit.")
        self._turn_replay = counter(
            "turn_replay", "Retries that were given the turn that was begun, or committed, at an earlier try."
        )
        self._stream_resume = counter("stream_resume", "Streams that were read on after a break.")
        self._turn_handover = counter("turn_handover", "Turns that this process left to others when it stopped.")
        self._turn_takeover = counter("turn_takeover", "Turns of lost processes that went on in this one.")
        self._detached = Gauge(
            "nsm_turns_detached", "Turns that run without their client.", registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip

    def _register_store(self, registry: CollectorRegistry) -> None:
        self._store_seconds = Histogram(
            "nsm_store_operation_seconds", "Calls to the store of sessions.", ["operation", "outcome"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._store_seconds_of = functools.cache(self._store_seconds.labels)  # a turn makes a dozen calls
        self._store_bytes = Counter(
            "nsm_store_bytes_total", "Bytes of snapshots and logs that went to the store of sessions or came from it.",
            ["direction"], registry=registry,
        )  # fmt: skip
        self._store_damage = Counter(
            "nsm_store_damage_total", "Calls that met damage in the store of sessions, by the damaged part.", ["part"],
            registry=registry,
        )  # fmt: skip
        for part in get_args(DamagedPart):  # from the start, as above
            self._store_damage.labels(part)
        self._tenant_bytes = Gauge(
            "nsm_tenant_stored_bytes", "Bytes that a tenant's sessions take in the store, by the store's own count.",
            ["tenant"], registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        self._room = {
            part: Gauge(f"nsm_store_{part}_bytes", text, ["store"], registry=registry, multiprocess_mode="mostrecent")
            for part, text in (
                ("free", "Bytes that the store of sessions can still take before it refuses with 507."),
                ("limit", "Bytes that the store of sessions can take in all."),
            )
        }  # no sample where the store has no limit
        self._tenants: set[str] = set()
        self._tenant_sessions = Gauge(
            "nsm_tenant_sessions", "Sessions of a tenant.", ["tenant"], registry=registry,
            multiprocess_mode="mostrecent",
        )  # fmt: skip

    def resumed(self, outcome: Outcome) -> None:
        self._resume.labels(outcome).inc()

    def state_fetched(self, seconds: float) -> None:
        self._state_fetch.observe(seconds)

    def turn_resumed(self, source: Source, *, num_replayed: int) -> None:
        """The start of a turn on a session that has a log; `num_replayed`: tokens that it reads again."""
        self._state_source.labels(source).inc()
        self._replayed.inc(num_replayed)

    def turn_committed(self, seconds: float, *, num_bytes: int) -> None:
        """`num_bytes`: of the snapshot, 0 for none."""
        self._state_commit.observe(seconds)
        if num_bytes:
            self._state_bytes.observe(num_bytes)
            self.snapshot_ended("committed")

    def snapshot_ended(self, outcome: SnapshotEnd) -> None:
        self._snapshots.labels(outcome).inc()

    def snapshots_shed(self, num_sessions: int, *, which: Shed) -> None:
        """Sessions that nobody uses lost their older snapshots, or all."""
        self._shed.labels(which).inc(num_sessions)

    def states_held(self, num_bytes: int) -> None:
        """Bytes of states in memory now."""
        self._held_bytes.set(num_bytes)

    def commit_conflict(self) -> None:
        self._commit_conflict.inc()

    def lease_asked(self, seconds: float, *, is_busy: bool) -> None:
        """`seconds` until it was held, or refused as busy."""
        self._lease_wait.observe(seconds)
        if is_busy:
            self._lease_busy.inc()

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

    def store_called(
        self, operation: str, seconds: float, *, outcome: Literal["ok", "refused", "failed"], num_read: int = 0,
        num_written: int = 0,
    ) -> None:  # fmt: skip
        """`operation`: a method of SessionStore; `num_read`, `num_written`: bytes of snapshots and logs."""
        self._store_seconds_of(operation, outcome).observe(seconds)
        if num_read:
            self._store_bytes.labels("read").inc(num_read)
        if num_written:
            self._store_bytes.labels("written").inc(num_written)

    def room_measured(self, store: str, *, num_free: int, num_bytes: int) -> None:
        """Of `num_bytes` bytes that a store may take, `num_free` are left. `store`: its kind, such as "sqlite"."""
        self._room["free"].labels(store).set(num_free)
        self._room["limit"].labels(store).set(num_bytes)

    def store_damaged(self, part: DamagedPart) -> None:
        self._store_damage.labels(part).inc()

    def tenants_stored(self, usage: Mapping[str, tuple[int, int]]) -> None:
        """Sessions and bytes of each tenant there is; those of tenants that are gone are forgotten, or 0 where
        processes share their numbers, because a file cannot lose a sample.
        """
        for tenant in self._tenants - set(usage):
            for gauge in (self._tenant_bytes, self._tenant_sessions):
                if is_shared():
                    gauge.labels(tenant).set(0)
                else:
                    gauge.remove(tenant)
        self._tenants = set(usage)
        for tenant, (num_sessions, num_bytes) in usage.items():
            self._tenant_bytes.labels(tenant).set(num_bytes)
            self._tenant_sessions.labels(tenant).set(num_sessions)
