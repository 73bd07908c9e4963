"""The use case of one turn: take the lease, load, submit, stream, commit; independent of HTTP.

A turn runs in a task of its own, so that a client that leaves does not end it: it goes on to its commit, for at most
`detached_s` seconds. The session is free again before its last event is given out: the client may answer at once.

The store's lease keeps turns of other processes out, and the claim those of this one, without asking the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

from nsm_core.engine.request import Finished, FinishReason, GenerationRequest
from nsm_core.errors import KeyReused, NotFound, NsmError, SessionBusy, SnapshotCorrupt, StateMismatch, TurnCancelled
from service.backends.base import Generation, InferenceBackend
from service.continuation import Continuation, TurnRequest, require_version, resume
from service.leases import NO_CHUNKS, HeldLease, Leases
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.reframing import Reframer
from service.replay import LostState, make_replay
from service.sessions.base import SessionHead, SessionStore
from service.sessions.records import naming, session_busy
from service.sessions.turn_records import TurnRecord, TurnStart
from service.stored_turns import StoredToken, decode_request, decode_tokens, encode_request
from service.tenants import Tenants
from service.turn import Turn, TurnEnd, TurnSource, stopping
from service.turn_following import POLL_S, TurnFollower, stream_not_found
from service.turn_run import TurnRun

logger = logging.getLogger("nsm.turns")

Key = tuple[str, str]  # tenant, session id


class Turns:
    """Opens, tracks and ends the turns of this process; at most one runs on a session at a time."""

    def __init__(
        self,
        backend: InferenceBackend,
        store: SessionStore,
        *,
        metrics: Metrics,
        lifecycle: Lifecycle,
        detached_s: float,
        lease_s: float,
        tenants: Tenants,
        record_ttl_s: float = 86_400.0,
        max_records: int = 16,
        max_kept: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._store = store
        self._leases = Leases(store, lease_s=lease_s, metrics=metrics, max_kept=max_kept)
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._tenants = tenants
        self._detached_s = detached_s
        self._record_ttl_s = record_ttl_s
        self._max_records = max_records
        self._clock = clock
        self._running: dict[Key, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def open_turn(self, request: TurnRequest) -> Turn:
        """A new turn, whatever its identity. All that can refuse it happens here, before the first event.

        Raises SessionBusy, NotFound, VersionConflict, StateMismatch, SnapshotCorrupt, StoreUnavailable, InvalidRequest,
        RateLimited, QuotaExceeded, Overloaded or EngineDead.
        """
        self._require_open()
        request = dataclasses.replace(request, identity=None)
        async with self._holding(request.tenant, request.session_id) as (turn, held):
            await self._begin_record(held, request)
            return await self._begin(turn, held, request)

    async def open_or_join(self, request: TurnRequest) -> TurnSource:
        """A new turn, like `open_turn`, unless there is one that the request is a retry of.

        When a turn was begun for the same identity before, it is that one, from its first event on: it runs, here or in
        another process, or was committed. One whose process was lost is taken over. Raises KeyReused as well.
        """
        self._require_open()
        known = await self._known_here(request)
        if known is not None:
            return known
        try:
            async with self._holding(request.tenant, request.session_id, request) as (turn, held):
                record = await self._begin_record(held, request)
                if record.turn_id == request.request_id:
                    return await self._begin(turn, held, request)
                _require_same(record.digest, request)
                if record.status == "running":
                    turn.is_replay = True
                    await self._go_on(turn, held, record)
                    self._metrics.turn_replayed()
                    return turn
        except SessionBusy:
            known = await self._known_elsewhere(request)
            if known is None:
                raise
            return known
        self._metrics.turn_replayed()
        return self._reader(request.tenant, request.session_id, record)

    async def follow(self, *, tenant: str, session_id: str, turn_id: str) -> TurnSource:
        """A turn of the session, running or not, from its first event on. Raises NotFound or StoreUnavailable."""
        running = self._running.get((tenant, session_id))
        if running is not None and running.turn_id == turn_id and running.begun.is_set():
            return running.follow()
        record = await self._store.get_turn(tenant=tenant, session_id=session_id, turn_id=turn_id)
        if record is None:
            raise stream_not_found(turn_id)
        return self._reader(tenant, session_id, record)

    async def take_over(self, tenant: str, session_id: str, turn_id: str) -> Turn | None:
        """Goes on with a running turn whose process was lost. None when it does not run any more, or somebody has it.

        Raises what keeps this process from doing it, as `open_turn`.
        """
        self._require_open()
        try:
            async with self._holding(tenant, session_id) as (turn, held):
                record = await self._store.get_turn(tenant=tenant, session_id=session_id, turn_id=turn_id)
                if record is not None and record.status == "running":
                    return await self._go_on(turn, held, record)
        except SessionBusy:
            pass  # by whoever was faster
        return None

    def _require_open(self) -> None:
        if self._is_draining:
            raise stopping()

    async def _known_here(self, request: TurnRequest) -> TurnSource | None:
        """The turn of this process that a retry asks for. Raises SessionBusy when it is another one."""
        while (running := self._running.get((request.tenant, request.session_id))) is not None:
            if request.identity is None or running.identity != request.identity:
                raise session_busy(request.session_id)
            _require_same(running.digest, request)
            await running.begun.wait()
            if running.turn_id:
                self._metrics.turn_replayed()
                return running.follow()
            await running.ended.wait()  # it was refused: this one tries itself
        return None

    async def _known_elsewhere(self, request: TurnRequest) -> TurnSource | None:
        """The turn that a retry asks for, when another process has the session."""
        if request.identity is None:
            return None
        record = await self._store.get_turn(
            tenant=request.tenant, session_id=request.session_id, identity=request.identity
        )
        if record is None:
            return None
        _require_same(record.digest, request)
        self._metrics.turn_replayed()
        return self._reader(request.tenant, request.session_id, record)

    def _reader(self, tenant: str, session_id: str, record: TurnRecord) -> TurnFollower:
        return TurnFollower(
            self._store,
            self._backend.tokenizer,
            record,
            tenant=tenant,
            session_id=session_id,
            take_over=self.take_over,
        )

    @contextlib.asynccontextmanager
    async def _holding(
        self, tenant: str, session_id: str, request: TurnRequest | None = None
    ) -> AsyncIterator[tuple[Turn, HeldLease]]:
        """Claim and lease, until the end of the block, or of the turn that began in it."""
        key = (tenant, session_id)
        turn = self._claim(key, request)
        held: HeldLease | None = None
        try:
            turn.permit = self._tenants.enter(tenant)
            held = await self._take_lease(tenant, session_id, turn)
            yield turn, held
        finally:
            if not turn.turn_id:
                if held is not None:
                    await held.give_back()
                self._release(key)

    async def _begin_record(self, held: HeldLease, request: TurnRequest) -> TurnRecord:
        start = TurnStart(
            turn_id=request.request_id,
            identity=request.identity,
            digest=request.digest,
            base_version=request.expected_version,
            request=encode_request(request, model_fingerprint=self._backend.model.fingerprint),
        )
        with _count_outcomes(self._metrics):
            return await held.begin_turn(start, max_records=self._max_records)

    async def _begin(self, turn: Turn, held: HeldLease, request: TurnRequest) -> Turn:
        """A new turn, whose record was begun; a refusal leaves no record."""
        try:
            await self._tenants.check_stored_bytes(request.tenant)
            start = await self._resume(held, request)
            generation_request = start.generation_request(request)
            with naming(request.session_id):
                generation = self._backend.submit(generation_request)
        except BaseException:
            with contextlib.suppress(NsmError):
                await held.forget_turn(request.request_id)
            raise
        self._run_on(turn, held, generation, start, request, generation_request)
        return turn

    async def _go_on(self, turn: Turn, held: HeldLease, record: TurnRecord) -> Turn:
        """Another process's turn, from where its record ends. A refusal leaves it for another try."""
        head = held.stored.head
        request, model_fingerprint = decode_request(
            record.request, tenant=head.tenant, session_id=head.session_id, turn_id=record.turn_id
        )
        if model_fingerprint != self._backend.model.fingerprint:
            raise StateMismatch(
                f"the turn was begun by model {model_fingerprint[:12]}, this server runs "
                f"{self._backend.model.fingerprint[:12]}"
            )
        tokens = [token for chunk in record.chunks for token in decode_tokens(chunk)]
        start = await self._resume(held, request)
        ids = tuple(token.token_id for token in tokens)
        generation_request = dataclasses.replace(
            start.generation_request(request), request_id=f"{record.turn_id}/{held.fence}", sampled_ids=ids
        )
        with naming(head.session_id):
            generation = self._backend.submit(generation_request)
        turn.identity, turn.digest = record.identity, record.digest
        logger.warning("session %s: a turn is taken over after %d tokens", head.session_id, len(tokens))
        self._metrics.turn_taken_over()
        self._run_on(turn, held, generation, start, request, generation_request, tokens, len(record.chunks))
        return turn

    def _run_on(
        self,
        turn: Turn,
        held: HeldLease,
        generation: Generation,
        start: Continuation,
        request: TurnRequest,
        generation_request: GenerationRequest,
        tokens: Sequence[StoredToken] = (),
        num_chunks: int = 0,
    ) -> None:
        """The turn's task; `tokens` were sampled before, and are in the record in so many chunks."""
        reframer = Reframer(self._backend.tokenizer, generation_request.sampling)
        turn.begin(
            generation,
            start,
            self._metrics.start_request(arrival=request.arrival),
            turn_id=request.request_id,
            framing=request.framing,
            earlier=[reframer.feed(token) for token in tokens],
        )
        run = TurnRun(
            turn=turn,
            held=held,
            generation=generation,
            start=start,
            request=generation_request,
            framing=request.framing,
            metrics=self._metrics,
            record_ttl_s=self._record_ttl_s,
            clock=self._clock,
        )
        self._track(self._run(run, tokens, num_chunks))

    @contextlib.asynccontextmanager
    async def exclusive(self, *, tenant: str, session_id: str) -> AsyncIterator[tuple[Turn, HeldLease]]:
        """The session for something else than a turn, which `cancel`, `delete` and `drain` stop like one.

        Raises SessionBusy, NotFound, StoreUnavailable, RateLimited or Overloaded.
        """
        self._require_open()
        key = (tenant, session_id)
        turn = self._claim(key)
        try:
            turn.permit = self._tenants.enter(tenant)
            held = await self._leases.take(tenant=tenant, session_id=session_id, on_lost=turn.stop)
            try:
                yield turn, held
            finally:
                turn.has_written = held.has_written
                await held.give_back()
        finally:
            self._release(key)

    async def cancel(self, *, tenant: str, session_id: str) -> bool:
        """Stops the session's turn, in whatever process it runs, and waits for its end; whether there was one that so
        ended without a commit.
        """
        turn = self._running.get((tenant, session_id))
        if turn is None:
            return await self._cancel_elsewhere(tenant, session_id)
        turn.stop(TurnCancelled(f"the turn of session {session_id!r} was cancelled; nothing of it was kept"))
        await turn.ended.wait()
        if turn.end is None:  # it was refused, or was no turn: see `exclusive`
            return not turn.has_written
        return turn.end.finished.reason is FinishReason.ABORT

    async def _cancel_elsewhere(self, tenant: str, session_id: str) -> bool:
        try:
            record = await self._store.cancel_turn(tenant=tenant, session_id=session_id)
        except NotFound:
            return False
        while record is not None and record.status == "running" and record.lease_left_s:
            await asyncio.sleep(POLL_S)
            record = await self._store.get_turn(
                tenant=tenant, session_id=session_id, turn_id=record.turn_id, first_chunk=NO_CHUNKS
            )
        return record is not None and record.status == "cancelled"

    async def delete(self, *, tenant: str, session_id: str) -> None:
        """Stops the session's turn, then deletes the session; no turn begins in between. Raises NotFound."""
        key = (tenant, session_id)
        while key in self._running:
            await self.cancel(tenant=tenant, session_id=session_id)
        self._claim(key)
        try:
            await self._store.delete(tenant=tenant, session_id=session_id)
        finally:
            self._release(key)

    async def drain(self, grace_s: float) -> None:
        """No new turns; those that run may finish within `grace_s`, then they are stopped. All have ended on return."""
        self._is_draining = True
        if self._running:
            waits = [asyncio.ensure_future(turn.ended.wait()) for turn in self._running.values()]
            await asyncio.wait(waits, timeout=grace_s)
            for turn in self._running.values():
                turn.stop(stopping())
            await asyncio.wait(waits)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _claim(self, key: Key, request: TurnRequest | None = None) -> Turn:
        if key in self._running:
            raise session_busy(key[1])
        identity, digest = (None, "") if request is None else (request.identity, request.digest)
        turn = Turn(self._metrics, detached_s=self._detached_s, identity=identity, digest=digest)
        self._running[key] = turn
        return turn

    def _release(self, key: Key, end: TurnEnd | None = None) -> None:
        self._running.pop(key).finish(end)

    def _track(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _take_lease(self, tenant: str, session_id: str, turn: Turn) -> HeldLease:
        started = time.monotonic()
        with _count_outcomes(self._metrics):
            held = await self._leases.take(tenant=tenant, session_id=session_id, on_lost=turn.stop)
        self._metrics.state_fetched(time.monotonic() - started)
        return held

    async def _resume(self, held: HeldLease, request: TurnRequest) -> Continuation:
        with _count_outcomes(self._metrics):
            require_version(held.stored.head, request.expected_version)
            model, tokenizer = self._backend.model, self._backend.tokenizer
            # in a thread, as below: megabytes and long counts would hold up every other stream
            found = await asyncio.to_thread(resume, held.stored, model=model, tokenizer=tokenizer)
            start = found if isinstance(found, Continuation) else await self._replay(held.stored.head, found)
        if start.head.num_log_tokens:
            self._metrics.session_resume(start.rebuilt or "hit")
        return start

    async def _replay(self, head: SessionHead, lost: LostState) -> Continuation:
        """The turn will read the whole log, from the start, before its own input."""
        tenant, session_id = head.tenant, head.session_id
        log_ids = await self._store.read_log(tenant=tenant, session_id=session_id)
        marks = await self._store.log_marks(tenant=tenant, session_id=session_id)
        logger.warning("session %s: state %s, made again from %d tokens", session_id, lost.reason, len(log_ids))
        replay = make_replay(lost, head, log_ids=log_ids, marks=marks)
        return Continuation(
            head=head, snapshot=None, model=self._backend.model, tokenizer=self._backend.tokenizer, replay=replay
        )

    async def _run(self, run: TurnRun, tokens: Sequence[StoredToken], num_chunks: int) -> None:
        """The turn's task. Whatever happens in it, the session is released and the turn has an end."""
        head, request_id = run.start.head, run.request.request_id
        # if this task itself is cancelled
        end = TurnEnd(finished=Finished(reason=FinishReason.ABORT), head=head, error=stopping())
        with self._lifecycle.track():
            try:
                end = await run.to_its_end(tokens, num_chunks=num_chunks)
            except Exception:
                logger.exception("request %s failed", request_id)
                error = NsmError(f"internal error; the server's log tells more under request id {request_id}")
                end = await run.fail(Finished(reason=FinishReason.ERROR), error)
            finally:
                try:
                    await run.held.give_back()
                finally:
                    self._release((head.tenant, head.session_id), end)


def _require_same(digest: str, request: TurnRequest) -> None:
    """Raises KeyReused: the same key, but not the same request."""
    if digest != request.digest:
        raise KeyReused(
            "Idempotency-Key was used before for another request on this session; a new request needs a new key"
        )


@contextlib.contextmanager
def _count_outcomes(metrics: Metrics) -> Iterator[None]:
    try:
        yield
    except StateMismatch:
        metrics.session_resume("refused")
        raise
    except (NotFound, SnapshotCorrupt):
        metrics.session_resume("miss")
        raise
