"""The use case of one turn: take the lease, load, submit, stream, commit; independent of HTTP.

A turn runs in a task of its own, so that a client that leaves does not end it: it goes on to its commit, for at most
`detached_s` seconds. The session is free again before its last event is given out: the client may answer at once.

The store's lease keeps turns of other processes out, and the reservation those of this one, without asking the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import EngineDead, KeyReused, NotFound, SessionBusy, TurnCancelled
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.lifecycle.lifecycle import Lifecycle
from service.state.keeper import StateKeeper
from service.state.resume import TurnRequest
from service.stores.sessions.base import SessionStore
from service.stores.sessions.errors import session_busy
from service.stores.sessions.key import SessionKey
from service.stores.sessions.turn_records import TurnRecord
from service.telemetry.metrics.metrics import Metrics
from service.tenants.tenants import Tenants
from service.turns.admission import TurnAdmission
from service.turns.execution import TurnExecution
from service.turns.follower import POLL_S, TurnFollower, stream_not_found
from service.turns.lease import NO_CHUNKS, HeldLease, Leases
from service.turns.turn import HandedOver, Turn, TurnOutcome, TurnSource, stopping

DETACHED_S = 300.0
RECORD_TTL_S = 86_400.0  # of the result of a turn


class TurnRegistry:
    """Opens, tracks and ends the turns of this process; at most one runs on a session at a time."""

    def __init__(
        self,
        backend: InferenceBackend,
        store: SessionStore,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        lease_s: float,
        tenants: Tenants,
        detached_s: float = DETACHED_S,
        record_ttl_s: float = RECORD_TTL_S,
        max_records: int = 16,
        max_retained: int = 0,
        state_format: StateFormat = StateFormat.FP32,
        keeper: StateKeeper | None = None,
        replica: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keeper`: None for one that stores each turn's state and keeps none. `replica`: see SessionHead."""
        self.replica = replica
        self._backend = backend
        self._store = store
        self.keeper = keeper or StateKeeper(backend, store, metrics, state_format=state_format)
        self._leases = Leases(
            store,
            lease_s=lease_s,
            metrics=metrics,
            max_retained=max_retained,
            state_format=state_format,
            replica=replica,
        )
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._tenants = tenants
        self._detached_s = detached_s
        self.record_ttl_s = record_ttl_s
        self._opening = TurnAdmission(
            backend=backend,
            store=store,
            keeper=self.keeper,
            leases=self._leases,
            metrics=metrics,
            tenants=tenants,
            record_ttl_s=record_ttl_s,
            max_records=max_records,
            clock=clock,
        )
        self._running: dict[SessionKey, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._has_stopped = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_running(self, key: SessionKey) -> bool:
        """Whether something holds the session in this process."""
        return key in self._running

    async def open_turn(self, request: TurnRequest) -> Turn:
        """A new turn, whatever its identity. All that can refuse it happens here, before the first event.

        Raises SessionBusy, NotFound, VersionConflict, StateMismatch, SnapshotCorrupt, StoreUnavailable, InvalidRequest,
        RateLimited, QuotaExceeded, Overloaded or EngineDead.
        """
        self._require_open()
        request = dataclasses.replace(request, identity=None)
        async with self._holding(request.key, request) as (turn, held):
            return self._run(await self._opening.begin(turn, held, request))

    async def open_or_join(self, request: TurnRequest) -> TurnSource:
        """A new turn, like `open_turn`, unless there is one that the request is a retry of.

        When a turn was begun for the same identity before, it is that one, from its first event on: it runs, here or in
        another process, or was committed. One whose process was lost is taken over. A committed one needs no engine.
        Raises KeyReused as well.
        """
        self._require_open()
        known = await self._known_here(request)
        if known is not None:
            return known
        try:
            async with self._holding(request.key, request) as (turn, held):
                record = held.record
                if record is None or record.turn_id == request.request_id:
                    return self._run(await self._opening.begin(turn, held, request))
                require_same(record.digest, request.digest)
                if record.status == "running":
                    turn.is_replay = True
                    run = await self._opening.go_on(turn, held, record, retry=request)
                    self._metrics.sessions.turn_replayed()
                    return self._run(run)
        except SessionBusy:
            known = await self._known_elsewhere(request)
            if known is None:
                raise
            return known
        except EngineDead:  # it is asked for the session's state before the record is read
            known = await self._known_elsewhere(request, is_committed=True)
            if known is None:
                raise
            return known
        self._metrics.sessions.turn_replayed()
        return await self._reader(request.key, record)

    async def follow(self, key: SessionKey, *, turn_id: str) -> TurnSource:
        """A turn of the session, running or not, from its first event on. Raises NotFound or StoreUnavailable."""
        running = self._running.get(key)
        if running is not None and running.turn_id == turn_id and running.begun.is_set():
            return running.follow()
        record = await self._store.get_turn(key, turn_id=turn_id)
        if record is None:
            raise stream_not_found(turn_id)
        return await self._reader(key, record)

    async def take_over(self, key: SessionKey, turn_id: str) -> Turn | None:
        """Continues a running turn whose process was lost. None if it has ended, or another process has it.

        Raises the errors of `open_turn`.
        """
        if self._is_draining:
            raise HandedOver
        try:
            async with self._holding(key) as (turn, held):
                record = await self._store.get_turn(key, turn_id=turn_id)
                if record is not None and record.status == "running":
                    return self._run(await self._opening.go_on(turn, held, record))
        except SessionBusy:
            pass  # by whoever was faster
        return None

    def _require_open(self) -> None:
        if self._is_draining:
            raise stopping()

    async def _known_here(self, request: TurnRequest) -> TurnSource | None:
        """The turn of this process that a retry asks for. Raises SessionBusy when it is another one."""
        while (running := self._running.get(request.key)) is not None:
            if request.identity is None or running.identity != request.identity:
                raise session_busy(request.key.session_id)
            require_same(running.digest, request.digest)
            await running.begun.wait()
            if running.turn_id:
                self._metrics.sessions.turn_replayed()
                return running.follow()
            await running.ended.wait()  # it was refused: this one tries itself
        return None

    async def _known_elsewhere(self, request: TurnRequest, *, is_committed: bool = False) -> TurnSource | None:
        """The turn that a retry asks for, without the session's lease. `is_committed`: not one that still runs."""
        if request.identity is None:
            return None
        return await self._recorded(request.key, request.identity, request.digest, is_committed=is_committed)

    async def committed(self, key: SessionKey, *, identity: str, digest: str) -> TurnSource | None:
        """The committed turn that a retry asks for, without the engine. Raises KeyReused for another body."""
        return await self._recorded(key, identity, digest, is_committed=True)

    async def _recorded(self, key: SessionKey, identity: str, digest: str, *, is_committed: bool) -> TurnSource | None:
        record = await self._store.get_turn(key, identity=identity)
        if record is None or (is_committed and record.status != "committed"):
            return None
        require_same(record.digest, digest)
        self._metrics.sessions.turn_replayed()
        return await self._reader(key, record)

    async def _reader(self, key: SessionKey, record: TurnRecord) -> TurnFollower:
        return await asyncio.to_thread(  # a long result with log-probabilities is megabytes
            TurnFollower,
            self._store,
            self._backend.tokenizer,
            record,
            key,
            take_over=self.take_over,
            has_stopped=self._has_stopped,
        )

    def _holding(
        self, key: SessionKey, request: TurnRequest | None = None
    ) -> contextlib.AbstractAsyncContextManager[tuple[Turn, HeldLease]]:
        """Reservation and lease for a turn, until the end of the block, or of the turn that began in it."""

        def take(turn: Turn) -> Awaitable[HeldLease]:
            return self._opening.take_lease(key, turn, request)

        return self._reserved(key, take, request)

    def exclusive(
        self, key: SessionKey, *, is_hot: bool = False
    ) -> contextlib.AbstractAsyncContextManager[tuple[Turn, HeldLease]]:
        """The session for something else than a turn, which `cancel`, `delete` and `drain` stop like one.

        `is_hot`: it goes on from the state that this process has, and gives the next one to the keeper, as a turn does.

        Raises SessionBusy, NotFound, StoreUnavailable, RateLimited or Overloaded.
        """
        self._require_open()

        async def take(turn: Turn) -> HeldLease:
            hot = await self.keeper.find(key) if is_hot else None
            return await self._leases.take(key, on_lost=turn.stop, hot=hot)

        return self._reserved(key, take, is_hot=is_hot)

    async def begin_record(self, held: HeldLease, request: TurnRequest) -> TurnRecord | None:
        """For work inside `exclusive` that a retry may ask for again: its record, or that of the first try. Whoever
        gets a running one, or None, commits with its result or forgets it. Raises VersionConflict or StateMismatch.
        """
        return await self._opening.begin_record(held, request)

    @contextlib.asynccontextmanager
    async def _reserved(
        self,
        key: SessionKey,
        take: Callable[[Turn], Awaitable[HeldLease]],
        request: TurnRequest | None = None,
        *,
        is_hot: bool = False,
    ) -> AsyncIterator[tuple[Turn, HeldLease]]:
        turn = self._reserve(key, request)
        held: HeldLease | None = None
        try:
            turn.permit = self._tenants.enter(key.tenant)
            held = await take(turn)
            yield turn, held
        finally:
            if not turn.turn_id:  # no turn began that goes on by itself
                try:
                    if held is not None:
                        turn.has_written = held.has_written
                        if held.has_written and not is_hot:
                            self.keeper.forget(key)
                        await held.give_back()
                finally:
                    self._release(key)

    async def cancel(self, key: SessionKey) -> bool:
        """Stops the session's turn, in whatever process it runs, and waits for its end; whether there was one that so
        ended without a commit.
        """
        turn = self._running.get(key)
        if turn is None:
            return await self._cancel_elsewhere(key)
        turn.stop(TurnCancelled(f"the turn of session {key.session_id!r} was cancelled; nothing of it was kept"))
        await turn.ended.wait()
        if turn.end is None:  # it was refused, or was no turn: see `exclusive`
            return not turn.has_written
        return turn.end.finished.reason is FinishReason.ABORT

    async def _cancel_elsewhere(self, key: SessionKey) -> bool:
        try:
            record = await self._store.cancel_turn(key)
        except NotFound:
            return False
        while record is not None and record.status == "running" and record.lease_left_s:
            await asyncio.sleep(POLL_S)
            record = await self._store.get_turn(
                key,
                turn_id=record.turn_id,
                first_chunk=NO_CHUNKS,
                with_request=False,
            )
        return record is not None and record.status == "cancelled"

    async def delete(self, key: SessionKey) -> None:
        """Stops the session's turn, then deletes the session; no turn begins in between. Raises NotFound."""
        while key in self._running:
            await self.cancel(key)
        self._reserve(key)
        try:
            await self._store.delete(key)
            self.keeper.forget(key)
        finally:
            self._release(key)

    async def drain(self, grace_s: float) -> None:
        """No new turns; those that run may finish within `grace_s`, then they end here. All have on return."""
        self._is_draining = True
        if self._running:
            waits = [asyncio.ensure_future(turn.ended.wait()) for turn in self._running.values()]
            await asyncio.wait(waits, timeout=grace_s)
            for turn in self._running.values():
                turn.give_up()
            await asyncio.wait(waits)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.keeper.drain()

    def stop_following(self) -> None:
        """Readers of another process's turn get an error that this server stops."""
        self._has_stopped.set()

    def _reserve(self, key: SessionKey, request: TurnRequest | None = None) -> Turn:
        if key in self._running:
            raise session_busy(key.session_id)
        identity, digest = (None, "") if request is None else (request.identity, request.digest)
        turn = Turn(self._metrics, detached_s=self._detached_s, identity=identity, digest=digest)
        self._running[key] = turn
        return turn

    def _release(self, key: SessionKey, end: TurnOutcome | None = None) -> None:
        self._running.pop(key).finish(end)

    def _run(self, run: TurnExecution) -> Turn:
        """Starts the turn's task."""
        task = asyncio.create_task(self._execute(run))
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return run.turn

    async def _execute(self, run: TurnExecution) -> None:
        """Whatever happens in it, the session is released and the turn has an end."""
        head = run.start.head
        # if this task itself is cancelled
        end = TurnOutcome(finished=Finished(reason=FinishReason.ABORT), head=head, error=stopping())
        with self._lifecycle.track():
            try:
                end = await run.execute()
            finally:
                try:
                    await run.held.give_back()
                finally:
                    self._release(head.key, end)


def require_same(first: str, digest: str) -> None:
    """Raises KeyReused: the same key, but not the digest of its first request."""
    if digest != first:
        raise KeyReused(
            "Idempotency-Key was used before for another request on this session; a new request needs a new key"
        )
