"""Where the states of sessions are between turns, and when they become snapshots in the store.

A turn commits its tokens. Its state stays here, and the next turn of this process takes it if it is still the head's.
Any other process starts from the newest stored snapshot and reads the log from there. A snapshot is stored when that
would take long and somebody is likely to need it: the session is idle, its turns come from other processes, its state
must leave the memory, or the server stops. A session that is never idle gets one after many tokens.

A state is stored with each turn if a log that is read again may give other bits than sampling did (some executors), or
if stored states are rounded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from nsm_core.engine.request import Finished
from nsm_core.errors import EngineDead
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from service.backends.base import InferenceBackend
from service.state.engine_held import EngineHeld
from service.state.hot_states import HotState, HotStates
from service.state.reading_speed import ReadingSpeed
from service.state.resume import ResumedSession
from service.state.snapshot_writer import SnapshotWriter
from service.stores.sessions.base import SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.sessions import Shed

IDLE_S = 60.0  # after the last turn of a session: a talk that goes on needs no snapshot
# What a session that is never idle may write for a token, in bytes of its state as often as the store writes them:
# 5.8 KB for a turn of 64 tokens. The rest of such a turn is 11 KB with SQLite, or Redis and `appendfsync always`, and
# both together are to be 16 KB, as states are packed.
BUSY_BYTES = 90
LONG_TURN_BYTES = 1_280  # a turn that alone took many tokens may write more
# In limits, the least and the most tokens after which one is stored at once: 0.3 and 35 s of reading. With 13 s, a
# server that has measured nothing yet would write 24 KB for a turn of 64 tokens with SQLite.
LEAST_AT_ONCE, MOST_AT_ONCE = 8, 875
REPLAY_S = 0.04  # the time to read again that the limit stands for
FIRST_TOKENS_PER_S = 2_560.0  # until a reading was measured
MIN_LIMIT = 16
# A GPU reads 50,000 tokens in REPLAY_S, more than most sessions have: they would have no snapshot, and a turn after a
# rest would read all again, for 12 times the device time of its own (benchmarks.sizing). So many take 3 ms.
MAX_LIMIT = 4_096
DRAIN_S = 10.0
SWEEP_S = 1.0  # at least between two searches for idle sessions


def limit_at(tokens_per_s: float) -> int:
    """Tokens to read again that are worth a snapshot, at this reading speed."""
    return min(max(MIN_LIMIT, round(REPLAY_S * tokens_per_s)), MAX_LIMIT)


def tokens_worth(num_written: int, num_bytes: int, limit: int) -> int:
    """Tokens after which `num_written` bytes may be written at once: `num_bytes` for each. `limit`: see `limit_at`."""
    return min(max(num_written // num_bytes, LEAST_AT_ONCE * limit), MOST_AT_ONCE * limit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """`max_bytes`: of states in memory. `limit`: tokens to read again that are worth a snapshot; 0: each turn stores
    its state; None: as many as are read in REPLAY_S, at most MAX_LIMIT. `idle_s`: see IDLE_S.
    """

    max_bytes: int = 0
    limit: int | None = 0
    idle_s: float = IDLE_S


class StateKeeper:
    """Lives on the event loop of one application."""

    def __init__(
        self,
        backend: InferenceBackend,
        store: SessionStore,
        metrics: Metrics,
        *,
        policy: SnapshotPolicy | None = None,
        max_retained: int = 0,
        state_format: StateFormat = StateFormat.FP32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._snapshot_writes = store.snapshot_writes
        self._metrics = metrics
        self._policy = policy or SnapshotPolicy()
        self.state_format = state_format
        self._clock = clock
        self._states = HotStates(self._policy.max_bytes)
        self._engine = EngineHeld(backend)
        self._writer = SnapshotWriter(store, metrics, max_retained=max_retained, on_end=self._written, fetch=self.fetch)
        self._under_way: dict[SessionKey, int] = {}  # versions whose snapshots the writer has
        self._speed: ReadingSpeed | None = None  # known when the backend has started
        self._timer: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        """Tokens to read again that are worth a snapshot."""
        if self._policy.limit is not None:
            return self._policy.limit
        return limit_at(self._reading.tokens_per_s)

    @property
    def _reading(self) -> ReadingSpeed:
        if self._speed is None:
            self._speed = ReadingSpeed(FIRST_TOKENS_PER_S, is_single=self._backend.model.replays_singly)
        return self._speed

    @property
    def model_class(self) -> tuple[str, str]:
        """Fingerprint and numerics class of the running model: it makes the same state of the same log."""
        return self._backend.model.fingerprint, self._backend.model.numerics

    def makes_again(self, head: SessionHead) -> bool:
        """Whether the running model makes the session's state again of its log, to the bit."""
        return not self.is_always and (head.model_fingerprint, head.numerics) == self.model_class

    @property
    def is_always(self) -> bool:
        """Whether each turn stores its state."""
        is_exact = self._backend.model.replays_exactly and self.state_format is StateFormat.FP32
        return not is_exact or self._policy.limit == 0

    async def find(self, key: SessionKey) -> HotState | None:
        """The session's state, if it is here or in the engine; whoever uses it compares its version with the head's.

        Raises EngineDead.
        """
        here = self._states.get(key)
        if not self._engine.is_used:
            return here
        found = await self._engine.find(key, now=self._clock())
        if found is None and here is not None and here.snapshot.held is not None:
            self._states.remove(key)  # it had to go, or was another engine's
            return None
        return here if found is None or (here is not None and here.snapshot.held == found.snapshot.held) else found

    async def fetch(self, hot: HotState) -> Snapshot | None:
        """Its snapshot with the bytes; None if the engine had to give it up."""
        snapshot = await self._engine.fetch(hot.snapshot)
        if snapshot is None and self._states.get(hot.head.key) is hot:
            self._states.remove(hot.head.key)
        return snapshot

    async def bytes_of(self, snapshot: Snapshot) -> Snapshot | None:
        """The same with its bytes; None if they cannot be had, because the engine has ended or gave it up."""
        try:
            return await self._engine.fetch(snapshot)
        except EngineDead:
            return None

    def is_held(self, start: ResumedSession) -> bool:
        """Whether the turn that begins so leaves its state with the engine."""
        return self._engine.is_used and self._policy.max_bytes > 0 and not self.is_due_with(start)

    def is_due_with(self, start: ResumedSession) -> bool:
        """Whether the turn that began so must commit its state."""
        return self.is_always or start.rebuilt is not None or start.other_numerics is not None

    def committed(
        self,
        head: SessionHead,
        snapshot: Snapshot,
        *,
        num_replayed: int,
        finished: Finished,
        border: Snapshot | None = None,
    ) -> None:
        """A turn ended here in `snapshot`; `num_replayed`: tokens that it had to read again. `border`: see HotState."""
        self._reading.observe(finished)
        if self.state_format is not StateFormat.FP32:
            return  # the next turn must start from the rounded state
        hot = HotState(head, snapshot, self._clock(), border=border)
        self._engine.put(hot)
        self._put(hot)
        if self._is_due_at_once(hot, num_replayed, finished) and head.key not in self._under_way:
            self._write(hot)
        elif self._is_due(hot):
            self._wake_in(self._policy.idle_s)

    def copied(self, source: SessionHead, target: SessionHead) -> None:
        """`target` was made as a copy of `source`: it has the same state, if that one is here.

        It is not stored: another process starts from a snapshot of `source`, or reads the log.
        """
        hot = self._states.get(source.key)
        if hot is None or hot.known != (source.created_at, source.version):
            return
        if hot.head.num_log_tokens != source.num_log_tokens:
            return  # the copy ends inside the newest turn
        border = None if hot.border is None else _as_own(hot.border, target)
        forked = HotState(target, _as_own(hot.snapshot, target), self._clock(), is_unused_fork=True, border=border)
        self._engine.put(forked)
        self._put(forked)

    def offer(self, head: SessionHead, snapshot: Snapshot) -> None:
        """A state of the head that had to be computed: it is stored, if it spares enough."""
        if head.position - head.snapshot_position > self.limit and not self.is_always:
            self._writer.add(HotState(head, snapshot, self._clock()))

    def forget(self, key: SessionKey) -> None:
        """The session is deleted, or was taken back."""
        self._states.remove(key)
        self._engine.forget(key)
        self._writer.forget(key)
        self._under_way.pop(key, None)
        self._metrics.sessions.states_held(self._states.num_bytes)

    def shed(self, num_sessions: int, which: Shed) -> None:
        """So many sessions lost snapshots because nobody uses them."""
        self._metrics.sessions.snapshots_shed(num_sessions, which=which)

    async def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Stores what is worth it, and ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for hot in sorted(self._states, key=lambda hot: hot.used_at):
            if self._is_due(hot):
                self._write(hot)
        await self._writer.drain(timeout_s)

    def _put(self, hot: HotState) -> None:
        for evicted in self._states.put(hot):
            if self._is_due(evicted):
                self._write(evicted)
        self._metrics.sessions.states_held(self._states.num_bytes)

    def _is_due(self, hot: HotState) -> bool:
        is_under_way = self._under_way.get(hot.head.key) == hot.head.version
        return not (is_under_way or hot.is_unused_fork) and hot.num_unsaved > self.limit

    def _is_due_at_once(self, hot: HotState, num_replayed: int, finished: Finished) -> bool:
        """Whether the session needs a snapshot before it is idle."""
        if num_replayed:  # the session's turns come from several processes
            return hot.num_unsaved > self.limit
        state_bytes = hot.snapshot.header.state_bytes
        num_read = finished.prompt_tokens - finished.cached_tokens + finished.completion_tokens
        is_long = min(num_read, hot.num_unsaved) > tokens_worth(state_bytes, LONG_TURN_BYTES, self.limit)
        num_written = round(state_bytes * self._snapshot_writes)
        return is_long or hot.num_unsaved > tokens_worth(num_written, BUSY_BYTES, self.limit)

    def _write(self, hot: HotState) -> None:
        self._under_way[hot.head.key] = hot.head.version
        self._writer.add(hot if hot.border is None else HotState(hot.head, hot.border, hot.used_at))

    def _written(self, key: SessionKey, head: SessionHead | None) -> None:
        self._under_way.pop(key, None)
        hot = self._states.get(key)
        if hot is None or head is None:
            if hot is not None:
                hot.used_at = self._clock()  # again when it has been idle for a while
                self._wake_in(self._policy.idle_s)
            return
        if hot.head.created_at == head.created_at:
            hot.head = dataclasses.replace(
                hot.head,
                snapshot_version=head.snapshot_version,
                snapshot_position=head.snapshot_position,
                snapshot_bytes=head.snapshot_bytes,
            )

    def _wake_in(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(seconds, SWEEP_S), self._sweep)

    def _sweep(self) -> None:
        """Stores the states of sessions that have been idle."""
        self._timer = None
        now, waits = self._clock(), []
        for hot in self._states:
            if self._is_due(hot):
                left_s = hot.used_at + self._policy.idle_s - now
                if left_s <= 0:
                    self._write(hot)
                else:
                    waits.append(left_s)
        if waits:
            self._wake_in(min(waits))


def _as_own(snapshot: Snapshot, head: SessionHead) -> Snapshot:
    """The state of a session, as that of its copy."""
    header = dataclasses.replace(snapshot.header, tenant=head.tenant, session_id=head.session_id)
    return dataclasses.replace(snapshot, header=header)
