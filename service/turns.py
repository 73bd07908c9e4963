"""The use case of one turn: take the lease, load, submit, stream, commit; independent of HTTP.

A turn runs in a task of its own, so that a client that leaves does not end it: it goes on to its commit, for at most
`detached_s` seconds. The session is free again before its last event is given out: the client may answer at once.

The store's lease keeps turns of other processes out, and the claim those of this one, without asking the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

from nsm_core.engine.request import EndState, Finished, FinishReason, GenerationRequest
from nsm_core.errors import (
    NotFound,
    NsmError,
    SnapshotCorrupt,
    StateMismatch,
    TurnCancelled,
    VersionConflict,
)
from service.backends.base import Generation, InferenceBackend
from service.continuation import Continuation, TurnRequest, require_version, resume
from service.leases import HeldLease, Leases
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.replay import LostState, make_replay
from service.sessions.base import SessionHead, SessionStore
from service.sessions.records import naming, session_busy
from service.tenants import Tenants
from service.turn import Turn, TurnEnd, stopping

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._store = store
        self._leases = Leases(store, lease_s=lease_s, metrics=metrics)
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._tenants = tenants
        self._detached_s = detached_s
        self._clock = clock
        self._running: dict[Key, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def open_turn(self, request: TurnRequest) -> Turn:
        """Everything that can refuse a turn happens here, before the first event.

        Raises SessionBusy, NotFound, VersionConflict, StateMismatch, SnapshotCorrupt, StoreUnavailable, InvalidRequest,
        RateLimited, QuotaExceeded, Overloaded or EngineDead.
        """
        if self._is_draining:
            raise stopping()
        key = (request.tenant, request.session_id)
        turn = self._claim(key)
        held: HeldLease | None = None
        try:
            turn.permit = self._tenants.enter(request.tenant)
            await self._tenants.check_stored_bytes(request.tenant)
            held = await self._take_lease(request, turn)
            start = await self._resume(held, request)
            generation_request = start.generation_request(request)
            with naming(request.session_id):
                generation = self._backend.submit(generation_request)
        except BaseException:
            if held is not None:
                await held.give_back()
            self._release(key)
            raise
        turn.begin(generation, start, self._metrics.start_request(arrival=request.arrival))
        self._track(self._run(turn, held, generation, start, generation_request))
        return turn

    @contextlib.asynccontextmanager
    async def exclusive(self, *, tenant: str, session_id: str) -> AsyncIterator[tuple[Turn, HeldLease]]:
        """The session for something else than a turn, which `cancel`, `delete` and `drain` stop like one.

        Raises SessionBusy, NotFound, StoreUnavailable, RateLimited or Overloaded.
        """
        if self._is_draining:
            raise stopping()
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
        """Stops the session's turn and waits for its end; whether there was one that so ended without a commit."""
        turn = self._running.get((tenant, session_id))
        if turn is None:
            return False
        turn.stop(TurnCancelled(f"the turn of session {session_id!r} was cancelled; nothing of it was kept"))
        await turn.ended.wait()
        if turn.end is None:  # it was refused, or was no turn: see `exclusive`
            return not turn.has_written
        return turn.end.finished.reason is FinishReason.ABORT

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

    def _claim(self, key: Key) -> Turn:
        if key in self._running:
            raise session_busy(key[1])
        turn = self._running[key] = Turn(self._metrics, detached_s=self._detached_s)
        return turn

    def _release(self, key: Key, end: TurnEnd | None = None) -> None:
        self._running.pop(key).finish(end)

    def _track(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _take_lease(self, request: TurnRequest, turn: Turn) -> HeldLease:
        started = time.monotonic()
        with _count_outcomes(self._metrics):
            held = await self._leases.take(tenant=request.tenant, session_id=request.session_id, on_lost=turn.stop)
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

    async def _run(
        self, turn: Turn, held: HeldLease, generation: Generation, start: Continuation, request: GenerationRequest
    ) -> None:
        """The turn's task. Whatever happens in it, the session is released and the turn has an end."""
        aborted = Finished(reason=FinishReason.ABORT)
        end = TurnEnd(finished=aborted, head=start.head, error=stopping())  # if this task itself is cancelled
        with self._lifecycle.track():
            try:
                finished = await _forward(generation, turn)
                end = await self._settle(turn, held, finished, start, request)
            except Exception:
                logger.exception("request %s failed", request.request_id)
                error = NsmError(f"internal error; the server's log tells more under request id {request.request_id}")
                end = TurnEnd(finished=Finished(reason=FinishReason.ERROR), head=start.head, error=error)
            finally:
                try:
                    await held.give_back()
                finally:
                    self._release((start.head.tenant, start.head.session_id), end)

    async def _settle(
        self, turn: Turn, held: HeldLease, finished: Finished, start: Continuation, request: GenerationRequest
    ) -> TurnEnd:
        """A turn that came to its own end becomes the session's next version; any other leaves it where it was."""
        error = turn.error_of(finished)
        if error is not None:
            return TurnEnd(finished=finished, head=start.head, error=error)
        if finished.end_state is None:
            raise RuntimeError("the engine ended a session's turn without its state")
        try:
            head = await self._commit(held, finished.end_state, start, request)
        except NsmError as commit_error:
            return TurnEnd(finished=finished, head=start.head, error=commit_error)
        return TurnEnd(finished=finished, head=head)

    async def _commit(
        self, held: HeldLease, end: EndState, start: Continuation, request: GenerationRequest
    ) -> SessionHead:
        started = time.monotonic()
        new_ids, seed = start.new_log_ids(end), request.sampling.seed
        raw = await asyncio.to_thread(lambda: start.next_snapshot(end, seed=seed, created_at=self._clock()).encode())
        try:
            head = await held.commit(
                expected_version=start.head.version,
                snapshot=raw,
                position=end.position,
                model_fingerprint=start.model.fingerprint,
                new_ids=new_ids,
                num_sampled=len(end.new_ids) - len(request.prompt_ids),
                seed=seed,
            )
        except VersionConflict:
            self._metrics.commit_conflict()
            raise
        self._metrics.state_committed(time.monotonic() - started, num_bytes=len(raw))
        return head


async def _forward(generation: Generation, turn: Turn) -> Finished:
    """Passes the events on as they come, and returns the last one instead of passing it on."""
    try:
        async for event in generation.events():
            if isinstance(event, Finished):
                return event
            turn.put(event)
    except BaseException:
        generation.cancel()
        raise
    raise RuntimeError("the engine ended a request without Finished")


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
