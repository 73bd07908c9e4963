"""From a request, or another process's record, to an admitted turn: all that can refuse it happens here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from nsm_core.engine.request import GenerationRequest
from nsm_core.errors import EngineDead, NotFound, NsmError, Overloaded, SnapshotCorrupt, StateMismatch, VersionConflict
from service.backends.background import with_priority
from service.backends.base import InferenceBackend
from service.state.earlier import stored_at
from service.state.keeper import StateKeeper
from service.state.origin import with_origins_snapshot
from service.state.other_model import require_own_model, shown_model
from service.state.rebuild import LostState, read_replay
from service.state.resume import ResumedSession, TurnRequest, require_version, resume, resume_after, resume_known
from service.stores.sessions.base import LogPoint, SessionHead, SessionStore
from service.stores.sessions.codec import naming
from service.stores.sessions.errors import OtherModel
from service.stores.sessions.key import SessionKey
from service.stores.sessions.turn_records import TurnRecord, TurnStart
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.sessions import Source
from service.tenants.tenants import Tenants
from service.turns.codec import StoredToken, decode_request, decode_tokens, encode_request
from service.turns.detokenize import EventReplayer
from service.turns.execution import MAX_RESTARTS, SecondStart, TurnExecution
from service.turns.lease import HeldLease, Leases
from service.turns.turn import Turn

logger = logging.getLogger("nsm.turns")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdmission:
    """What turns are opened with. `record_ttl_s`, `max_records`: how long, and of how many turns of a session, results
    are kept; `clock`: unix seconds, for snapshots.
    """

    backend: InferenceBackend
    store: SessionStore
    keeper: StateKeeper
    leases: Leases
    metrics: Metrics
    tenants: Tenants
    record_ttl_s: float
    max_records: int
    clock: Callable[[], float]

    async def take_lease(self, key: SessionKey, turn: Turn, request: TurnRequest | None = None) -> HeldLease:
        """With the request's record, or that of the turn it is a retry of.

        Raises SessionBusy, NotFound, VersionConflict, StateMismatch or StoreUnavailable.
        """
        started = time.monotonic()
        start = None if request is None else self.start_of(request)
        try:
            hot = await self.keeper.find(key)
            held = await self.leases.take(key, on_lost=turn.stop, hot=hot, start=start, max_records=self.max_records)
        except NsmError as error:
            await self._explain(error)
            raise
        self.metrics.sessions.state_fetched(time.monotonic() - started)
        return held

    async def _explain(self, error: NsmError) -> None:
        """Counts a failure, and adds what the store does not know: names of models, fields of requests. May raise a
        StateMismatch in place of the error.
        """
        if isinstance(error, VersionConflict):
            error.param = "expected_version"
        with _count_failures(self.metrics):
            if isinstance(error, OtherModel):
                tokenizer_fingerprint = self.backend.tokenizer.fingerprint
                await require_own_model(error.head, self.backend.model, tokenizer_fingerprint=tokenizer_fingerprint)
            if isinstance(error, StateMismatch | NotFound | SnapshotCorrupt):
                raise error

    def start_of(self, request: TurnRequest) -> TurnStart:
        """For the store."""
        return TurnStart(
            turn_id=request.request_id,
            identity=request.identity,
            digest=request.digest,
            base_version=request.expected_version,
            model_fingerprint=self.backend.model.fingerprint,
            request=encode_request(request, model_fingerprint=self.backend.model.fingerprint),
        )

    async def begin_record(self, held: HeldLease, request: TurnRequest) -> TurnRecord | None:
        """The same under a lease that was taken without it: see HeldLease.record."""
        start = self.start_of(request)
        try:
            return await held.begin_turn(start, max_records=self.max_records)
        except NsmError as error:
            await self._explain(error)
            raise

    async def begin(self, turn: Turn, held: HeldLease, request: TurnRequest) -> TurnExecution:
        """A new turn, whose record was begun or is due; a refusal leaves no record."""
        try:
            num_own_bytes = 0 if held.record is None else len(held.record.request)
            if num_own_bytes <= self.store.max_uncounted_request:
                num_own_bytes = 0
            await self.tenants.check_stored_bytes(request.key.tenant, num_own_bytes=num_own_bytes)
            start = await self._resume(held, request)
            return await self._submit(turn, held, start, request, functools.partial(self._ask, request))
        except BaseException:
            with contextlib.suppress(NsmError):
                await held.forget_turn(request.request_id)
            raise

    async def go_on(
        self, turn: Turn, held: HeldLease, record: TurnRecord, *, retry: TurnRequest | None = None
    ) -> TurnExecution:
        """Another process's turn, from where its record ends. A refusal leaves it for another try.

        `retry`: the request that asks for it now, and waits until its own deadline.
        """
        head, model = held.stored.head, self.backend.model
        request, model_fingerprint = decode_request(record.request, head.key, turn_id=record.turn_id)
        if retry is not None:
            request = dataclasses.replace(request, deadline=_later(request.deadline, retry.deadline))
        if model_fingerprint != model.fingerprint:
            raise StateMismatch(await asyncio.to_thread(_other_turn, model_fingerprint, model.fingerprint))
        tokens = [token for chunk in record.chunks for token in decode_tokens(chunk)]
        start = await self._resume(held, request)

        def ask(start: ResumedSession) -> GenerationRequest:
            return dataclasses.replace(
                self._ask(request, start),
                request_id=f"{record.turn_id}/{held.fence}",
                sampled_ids=tuple(token.token_id for token in tokens),
            )

        run = await self._submit(turn, held, start, request, ask, tokens, len(record.chunks))
        turn.identity, turn.digest = record.identity, record.digest
        logger.warning("session %s: a turn is taken over after %d tokens", head.session_id, len(tokens))
        self.metrics.sessions.turn_taken_over()
        return run

    def _ask(self, request: TurnRequest, start: ResumedSession) -> GenerationRequest:
        return start.generation_request(request, hold_state=self.keeper.is_held(start))

    async def _submit(
        self,
        turn: Turn,
        held: HeldLease,
        start: ResumedSession,
        request: TurnRequest,
        ask: Callable[[ResumedSession], GenerationRequest],
        earlier: Sequence[StoredToken] = (),
        num_chunks: int = 0,
    ) -> TurnExecution:
        """`ask`: what to ask the engine for, by the start."""

        def submit(start: ResumedSession, sampled_ids: tuple[int, ...] = ()) -> SecondStart:
            asked = ask(start)
            if sampled_ids:
                asked = dataclasses.replace(asked, sampled_ids=sampled_ids)
            with naming(request.key.session_id):
                generation = self.backend.submit(with_priority(asked))
            return SecondStart(generation=generation, start=start, request=asked)

        async def start_again(sampled_ids: tuple[int, ...]) -> SecondStart:
            self.backend.require_room()
            await held.start_without(self.keeper.bytes_of)
            return submit(await self._resume(held, request), sampled_ids)

        try:
            first = submit(start)
        except (EngineDead, Overloaded):
            if not start.is_held:
                raise
            first = await start_again(())  # the engine with the state is full or has ended
        generation, start, generation_request = first.generation, first.start, first.request
        if request.is_resumable:  # its client may read on by the record from now on
            try:
                await held.begin_due_turn()
            except BaseException:
                generation.cancel()
                raise
        replayer = EventReplayer(self.backend.tokenizer, generation_request.sampling)
        turn.begin(
            generation,
            start,
            self.metrics.requests.start(arrival=request.arrival),
            request,
            earlier=[replayer.feed(token) for token in earlier],
        )
        return TurnExecution(
            turn=turn,
            held=held,
            generation=generation,
            start=start,
            request=generation_request,
            render_options=request.render_options,
            earlier=earlier,
            num_chunks=num_chunks,
            start_again=start_again,
            num_restarts=MAX_RESTARTS if request.outlasts_engine else 0,
            metrics=self.metrics,
            keeper=self.keeper,
            record_ttl_s=self.record_ttl_s,
            clock=self.clock,
        )

    async def _resume(self, held: HeldLease, request: TurnRequest) -> ResumedSession:
        with _count_failures(self.metrics):
            require_version(held.stored.head, request.expected_version)
            model, tokenizer = self.backend.model, self.backend.tokenizer
            await require_own_model(held.stored.head, model, tokenizer_fingerprint=tokenizer.fingerprint)
            if request.after is not None:
                start = await self._resume_after(held, request.after)
            elif held.hot is not None:
                start = resume_known(held.stored.head, held.hot, model=model, tokenizer=tokenizer)
            else:
                # in a thread, as at the commit: megabytes and long counts would hold up every other stream
                stored = await with_origins_snapshot(self.store, held.stored)
                found = await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
                start = found if isinstance(found, ResumedSession) else await self._replay(held.stored.head, found)
        if start.head.num_log_tokens:
            self.metrics.sessions.resumed(start.rebuilt or "hit")
            is_here = held.hot is not None and not start.num_replayed
            source: Source = "memory" if is_here else "log" if start.num_replayed else "store"
            self.metrics.sessions.turn_resumed(source, num_replayed=start.num_replayed)
        return start

    async def _resume_after(self, held: HeldLease, point: LogPoint) -> ResumedSession:
        """The session at the end of an earlier version: from the state that was kept there, or an older one."""
        head, border = held.stored.head, held.border
        model, tokenizer = self.backend.model, self.backend.tokenizer
        if border is not None and (border.header.version, border.header.position) == (
            point.version,
            point.num_log_tokens,
        ):
            return resume_after(head, border, model=model, tokenizer=tokenizer)
        stored = held.stored if held.hot is None else await self.store.load(head.key)
        stored = await with_origins_snapshot(self.store, await stored_at(self.store, stored, point))
        found = await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
        start = found if isinstance(found, ResumedSession) else await self._replay(stored.head, found)
        return dataclasses.replace(start, after=point)

    async def _replay(self, head: SessionHead, lost: LostState) -> ResumedSession:
        """The turn will read the whole log, from the start, before its own input."""
        replay = await read_replay(self.store, lost, head)
        model, tokenizer = self.backend.model, self.backend.tokenizer
        logger.warning(
            "session %s: state %s, made again from %d tokens", head.session_id, lost.reason, len(replay.log_ids)
        )
        return ResumedSession(head=head, snapshot=None, model=model, tokenizer=tokenizer, replay=replay)


def _later(first: float | None, second: float | None) -> float | None:
    """Of two deadlines; None is that of a request that has none."""
    return None if first is None or second is None else max(first, second)


def _other_turn(fingerprint: str, running: str) -> str:
    return (
        f"the turn was begun by model {shown_model(fingerprint)}, this server runs {shown_model(running)}: only a "
        "server with the former can end it; once the session is this model's, a new turn takes its place"
    )


@contextlib.contextmanager
def _count_failures(metrics: Metrics) -> Iterator[None]:
    try:
        yield
    except StateMismatch:
        metrics.sessions.resumed("refused")
        raise
    except (NotFound, SnapshotCorrupt):
        metrics.sessions.resumed("miss")
        raise
