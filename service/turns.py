"""The use case of one turn: claim the session, load, submit, stream, commit; independent of HTTP.

A turn runs in a task of its own, so that a client that leaves does not end it: it goes on to its commit, for at most
`detached_s` seconds. The session is free again before its last event is given out: the client may answer at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine

from nsm_core.engine.request import EndState, Finished, FinishReason, GenerationRequest, PromptScored, TokenEvent
from nsm_core.errors import NsmError, Overloaded, SessionBusy
from service.backends.base import Generation, InferenceBackend
from service.continuation import Continuation, TurnRequest, require_version, resume
from service.sessions.base import SessionHead, SessionStore

logger = logging.getLogger("nsm.turns")

RETRY_AFTER_S = 1.0  # of a busy session: a turn takes about that long

Key = tuple[str, str]  # tenant, session id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The last event of every turn. `head` is the session's after it: moved on if and only if the turn was committed.

    `finished.error` is set when the turn failed, at the commit as well: then nothing of it was kept.
    """

    finished: Finished
    head: SessionHead


TurnEvent = PromptScored | TokenEvent | TurnEnd


class Turn:
    """A turn that was admitted. Made by `Turns.open_turn`."""

    def __init__(self, *, detached_s: float) -> None:
        self.ended = asyncio.Event()
        self.end: TurnEnd | None = None
        self.other_numerics: str | None = None
        self._detached_s = detached_s
        self._generation: Generation | None = None
        self._is_cancelled = False
        self._timer: asyncio.TimerHandle | None = None
        self._events: asyncio.Queue[TurnEvent] = asyncio.Queue()

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Each event once, in order, the last a TurnEnd; to be iterated by one consumer. Closing it early detaches."""
        try:
            while True:
                event = await self._events.get()
                yield event
                if isinstance(event, TurnEnd):
                    return
        finally:
            self.detach()

    def detach(self) -> None:
        """The client left: the turn may go on for `detached_s` seconds. Idempotent; nothing after the end."""
        if not self.ended.is_set() and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._detached_s, self.cancel)

    def cancel(self) -> None:
        """Stop within a step; the session stays at its last commit. Idempotent; too late once the commit has begun."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    def _begin(self, generation: Generation, start: Continuation) -> None:
        self._generation = generation
        self.other_numerics = start.other_numerics
        if self._is_cancelled:  # while the session was being loaded
            generation.cancel()

    def _put(self, event: TokenEvent | PromptScored) -> None:
        self._events.put_nowait(event)

    def _finish(self, end: TurnEnd | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.end = end
        self.ended.set()
        if end is not None:
            self._events.put_nowait(end)


class Turns:
    """Opens, tracks and ends the turns of this process; at most one runs on a session at a time."""

    def __init__(
        self,
        backend: InferenceBackend,
        store: SessionStore,
        *,
        detached_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._store = store
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
        Overloaded or EngineDead.
        """
        if self._is_draining:
            raise Overloaded("the server is shutting down")
        key = (request.tenant, request.session_id)
        turn = self._claim(key)
        try:
            start = await self._load(request)
            generation_request = start.generation_request(request)
            generation = self._backend.submit(generation_request)
        except BaseException:
            self._release(key)
            raise
        turn._begin(generation, start)
        self._track(self._run(turn, generation, start, generation_request))
        return turn

    async def cancel(self, *, tenant: str, session_id: str) -> bool:
        """Stops the session's turn and waits for its end; whether there was one that so ended without a commit."""
        turn = self._running.get((tenant, session_id))
        if turn is None:
            return False
        turn.cancel()
        await turn.ended.wait()
        return turn.end is not None and turn.end.finished.reason is FinishReason.ABORT

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
                turn.cancel()
            await asyncio.wait(waits)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _claim(self, key: Key) -> Turn:
        if key in self._running:
            raise SessionBusy(f"session {key[1]!r} is busy: another turn is running", retry_after_s=RETRY_AFTER_S)
        turn = self._running[key] = Turn(detached_s=self._detached_s)
        return turn

    def _release(self, key: Key, end: TurnEnd | None = None) -> None:
        self._running.pop(key)._finish(end)

    def _track(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _load(self, request: TurnRequest) -> Continuation:
        stored = await self._store.load(tenant=request.tenant, session_id=request.session_id)
        require_version(stored.head, request.expected_version)
        model, tokenizer = self._backend.model, self._backend.tokenizer
        # in a thread: a checksum over megabytes would hold up every other stream
        return await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)

    async def _run(self, turn: Turn, generation: Generation, start: Continuation, request: GenerationRequest) -> None:
        """The turn's task. Whatever happens in it, the session is released and the turn has an end."""
        end = TurnEnd(finished=Finished(reason=FinishReason.ABORT), head=start.head)  # if this task itself is cancelled
        try:
            finished = await _forward(generation, turn)
            end = await self._commit(finished, start, seed=request.sampling.seed)
        except Exception as error:
            if not isinstance(error, NsmError):
                logger.exception("request %s failed", request.request_id)
                error = NsmError(f"internal error; the server's log tells more under request id {request.request_id}")
            end = TurnEnd(finished=Finished(reason=FinishReason.ERROR, error=error), head=start.head)
        finally:
            self._release((start.head.tenant, start.head.session_id), end)

    async def _commit(self, finished: Finished, start: Continuation, *, seed: int) -> TurnEnd:
        """A turn that came to its own end becomes the session's next version; any other leaves it where it was."""
        if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return TurnEnd(finished=finished, head=start.head)
        if finished.end_state is None:
            raise RuntimeError("the engine ended a session's turn without its state")
        try:
            head = await self._store_turn(finished.end_state, start, seed=seed)
        except NsmError as error:
            failed = dataclasses.replace(finished, reason=FinishReason.ERROR, end_state=None, error=error)
            return TurnEnd(finished=failed, head=start.head)
        return TurnEnd(finished=finished, head=head)

    async def _store_turn(self, end: EndState, start: Continuation, *, seed: int) -> SessionHead:
        new_ids = start.new_log_ids(end)
        snapshot = start.next_snapshot(end, seed=seed, created_at=self._clock())
        return await self._store.commit(
            tenant=start.head.tenant,
            session_id=start.head.session_id,
            created_at=start.head.created_at,
            expected_version=start.head.version,
            snapshot=await asyncio.to_thread(snapshot.encode),
            position=end.position,
            model_fingerprint=start.model.fingerprint,
            new_ids=new_ids,
        )


async def _forward(generation: Generation, turn: Turn) -> Finished:
    """Passes the events on as they come, and returns the last one instead of passing it on."""
    try:
        async for event in generation.events():
            if isinstance(event, Finished):
                return event
            turn._put(event)
    except BaseException:
        generation.cancel()
        raise
    raise RuntimeError("the engine ended a request without Finished")
