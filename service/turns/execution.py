"""One admitted turn on its way: events to its readers, tokens to its record, and at the end a commit or none."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from nsm_core.engine.request import (
    EndState,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptState,
    TokenEvent,
    joules_of,
)
from nsm_core.engine.stream_pace import Write
from nsm_core.errors import (
    EngineDead,
    LeaseLost,
    NsmError,
    Overloaded,
    StoreUnavailable,
    TurnCancelled,
    VersionConflict,
)
from nsm_core.state.snapshot import Snapshot
from nsm_core.thoughts import begins_with_thought
from service.backends.base import Divertible, Generation
from service.state.keeper import StateKeeper
from service.state.resume import ResumedSession
from service.stores.sessions.base import Commit, SessionHead
from service.stores.sessions.transitions import SnapshotMark
from service.stores.sessions.turn_records import REPEATABLE, EndedTurn
from service.telemetry.metrics.metrics import Metrics
from service.turns.codec import CommitPoint, StoredToken, TurnResult, encode_result, plain_token, stored_token
from service.turns.lease import HeldLease
from service.turns.token_writer import TokenWriter
from service.turns.turn import HandedOver, TakenOver, Turn, TurnOutcome

logger = logging.getLogger("nsm.turns")

MAX_THOUGHT_MARK = 32  # tokens at the beginning of an answer that may have the tag of a thought
MAX_RESTARTS = 2  # of a turn whose engine ends: it may be the turn itself that ends them
ENGINE_BACK_S = 300.0  # within which the next engine must be there
RETRY_S = 0.1  # between two looks for it
MAX_INLINE_TOKENS = 512  # of a result that is encoded on the event loop: a thread would take longer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondStart:
    """Of a turn that its engine refused before the first token, or that goes on after its engine has ended."""

    generation: Generation
    start: ResumedSession
    request: GenerationRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnExecution:
    """All that belongs to it. `record_ttl_s`: how long its result is kept; `clock`: unix seconds, for the snapshot.

    `earlier`: what another process sampled of the turn, written down in so many chunks. `start_again`: admits it once
    more, without a state that an engine holds, after the tokens with these ids. `is_second`: it was, by another engine.
    `num_restarts`: how many engines that end it may still outlast. `border_states`: those that came, none or one.
    """

    turn: Turn
    held: HeldLease
    generation: Generation
    start: ResumedSession
    request: GenerationRequest
    render_options: Mapping[str, Any]
    earlier: Sequence[StoredToken]
    num_chunks: int
    start_again: Callable[[tuple[int, ...]], Awaitable[SecondStart]]
    num_restarts: int = 0
    is_second: bool = False
    metrics: Metrics
    keeper: StateKeeper
    record_ttl_s: float
    clock: Callable[[], float]
    border_states: list[PromptState] = dataclasses.field(default_factory=list)

    async def execute(self) -> TurnOutcome:
        """Committed, or failed with an error that a client may see."""
        try:
            run, finished, tokens = await self._sample()
            again = await run._admitted_again(finished) if len(tokens) == len(self.earlier) else None
            return await (run._commit_or_fail(finished, tokens) if again is None else again.execute())
        except NsmError as refusal:
            return await self._fail(Finished(reason=FinishReason.ERROR), refusal)
        except Exception:
            request_id = self.request.request_id
            logger.exception("request %s failed", request_id)
            error = NsmError(f"internal error; the server's log has details under request id {request_id}")
            return await self._fail(Finished(reason=FinishReason.ERROR), error)

    async def _admitted_again(self, finished: Finished) -> TurnExecution | None:
        """The same turn, if its engine is full or lost the state, and there is room. The client sees nothing of it."""
        is_lost = isinstance(finished.error, EngineDead) and self.start.is_held
        if self.is_second or not (is_lost or isinstance(finished.error, Overloaded)):
            return None
        try:
            second = await self.start_again(())
        except NsmError as error:
            logger.info("request %s was not admitted elsewhere: %s", self.request.request_id, error)
            return None  # the first refusal stands
        return dataclasses.replace(self._begun_again(second), is_second=True)

    def _begun_again(self, second: SecondStart) -> TurnExecution:
        self.turn.begin_again(second.generation, second.start)
        return dataclasses.replace(
            self, generation=second.generation, start=second.start, request=second.request, border_states=[]
        )

    async def _sample(self) -> tuple[TurnExecution, Finished, list[StoredToken]]:
        """To the end, and the turn as it ran last: the engine may have changed on the way."""
        log = TokenWriter(
            self.held,
            self.turn.turn_id,
            on_stop=self.turn.stop,
            earlier=self.earlier,
            num_chunks=self.num_chunks,
        )
        try:
            run, finished = self, await self._forward(log)
            while run._may_outlast(finished):
                restarted = await run._restarted(log.tokens)
                if restarted is None:
                    if self.turn.is_stopped:
                        finished = dataclasses.replace(finished, reason=FinishReason.ABORT, error=None)
                    break
                run, finished = restarted, await restarted._forward(log)
            if isinstance(finished.error, EngineDead) and self.num_restarts:
                finished = dataclasses.replace(finished, error=run._given_up(finished.error, self.num_restarts))
            return run, finished, log.tokens
        finally:
            await log.stop(is_complete=self.turn.is_handed_over)

    def _may_outlast(self, finished: Finished) -> bool:
        return isinstance(finished.error, EngineDead) and self.num_restarts > 0

    def _given_up(self, error: EngineDead, num_restarts: int) -> EngineDead:
        """The error of a turn that has outlasted all the engines that it may, with what helps."""
        if self.num_restarts:
            return EngineDead(
                f"{error}, and no other came within {ENGINE_BACK_S:g} s or before the deadline; nothing was kept: "
                "send it again once /health/ready is 200"
            )
        return EngineDead(
            f"{error}, as {num_restarts} others before it; nothing was kept: the request itself may end them, so see "
            "the engine's last lines in the server's log before you send it again"
        )

    async def _restarted(self, tokens: Sequence[StoredToken]) -> TurnExecution | None:
        """The turn after these tokens, with the next engine; None if it is stopped first, or none comes in time.

        The session's lease stays with it, so that nobody else takes it over meanwhile.
        """
        sampled_ids = tuple(token.token_id for token in tokens)
        end = time.monotonic() + ENGINE_BACK_S
        if self.request.deadline is not None:
            end = min(end, self.request.deadline)
        while not self.turn.is_stopped and time.monotonic() < end:
            try:
                second = await self.start_again(sampled_ids)
            except (EngineDead, Overloaded, StoreUnavailable):
                await asyncio.sleep(RETRY_S)
            else:
                logger.warning("turn %s goes on with the next engine after %d tokens", self.turn.turn_id, len(tokens))
                return dataclasses.replace(self._begun_again(second), num_restarts=self.num_restarts - 1)
        return None

    async def _fail(self, finished: Finished, error: NsmError, tokens: Iterable[StoredToken] = ()) -> TurnOutcome:
        """The session stays where it is, and the record tells why; that of a turn handed over still runs."""
        status: Literal["failed", "cancelled"] = "cancelled" if isinstance(error, TurnCancelled) else "failed"
        if isinstance(error, HandedOver):
            with contextlib.suppress(NsmError):  # whoever goes on with it starts from its record
                await self.held.begin_due_turn()
            self.metrics.sessions.turn_handed_over()
        elif isinstance(error, LeaseLost):
            error = await self._fate(error)
        else:
            with contextlib.suppress(NsmError):  # the client has the reason; a record that still runs is overwritten
                await self.held.end_turn(self._ended(finished, tokens, error=error), status=status)
        return TurnOutcome(finished=finished, head=self.held.stored.head, error=error)

    async def _fate(self, lost: LeaseLost) -> LeaseLost:
        """Whoever took the session may have continued this very turn."""
        with contextlib.suppress(NsmError):
            record = await self.held.read_turn(self.turn.turn_id)
            if record is not None and record.status in REPEATABLE:
                return TakenOver(self.turn.turn_id, is_committed=record.status == "committed")
        return lost

    async def _forward(self, log: TokenWriter) -> Finished:
        """Passes the events on as they come, and returns the last one instead of passing it on."""
        if isinstance(self.generation, Divertible):
            self.generation.divert(functools.partial(self._show, log))
        try:
            async for batch in self.generation.batches():
                self.border_states.extend(event for event in batch if isinstance(event, PromptState))
                tokens = [event for event in batch if isinstance(event, TokenEvent)]
                if tokens:
                    await self.held.begin_due_turn()
                    log.put(map(stored_token, tokens))
                    self.turn.put(tokens)
                if isinstance(batch[-1], Finished):
                    return dataclasses.replace(batch[-1], replayed_tokens=self.start.num_replayed)
        except BaseException:
            self.generation.cancel()
            raise
        raise RuntimeError("the engine ended a request without Finished")

    def _show(self, log: TokenWriter, ids: Sequence[int], texts: Sequence[str]) -> Write | None:
        """Puts the next tokens of a turn whose first ones were shown; None: nothing was put."""
        write = self.turn.show(len(log.tokens) + 1, ids, texts)
        if write is not None:
            log.put(map(plain_token, ids))
        return write

    async def _commit_or_fail(self, finished: Finished, tokens: list[StoredToken]) -> TurnOutcome:
        """A turn that came to its own end becomes the session's next version; any other leaves it where it was."""
        error = self.turn.error_of(finished)
        if error is not None:
            return await self._fail(finished, error, tokens)
        if finished.end_state is None:
            raise RuntimeError("the engine ended a session's turn without its state")
        try:
            head = await self._commit(finished, finished.end_state, tokens)
        except NsmError as commit_error:
            return await self._fail(finished, commit_error, tokens)
        return TurnOutcome(finished=finished, head=head, session_joules=self._session_joules(finished))

    async def _commit(self, finished: Finished, end: EndState, tokens: list[StoredToken]) -> SessionHead:
        started = time.monotonic()
        start, seed = self.start, self.request.sampling.seed
        new_ids = start.new_log_ids(end)
        num_before_border = self._num_before_border(tokens)
        num_versions = 1 if num_before_border is None else 2
        commit_point = CommitPoint(
            version=start.head.version + num_versions,
            position=end.position,
            num_log_tokens=start.head.num_log_tokens + len(new_ids),
        )

        snapshot = start.next_snapshot(
            end,
            seed=seed,
            created_at=self.clock(),
            state_format=self.held.state_format,
            joules=joules_of((finished,)),
            num_versions=num_versions,
        )
        border = None if num_before_border is None else self._border_snapshot(snapshot.header.created_at)
        has_snapshot = end.held is None and self.keeper.is_due_with(start)
        to_store = border or snapshot

        def encode() -> tuple[bytes | None, EndedTurn]:
            ended = self._ended(finished, tokens, commit_point=commit_point)
            return to_store.encode() if has_snapshot else None, ended

        is_small = not has_snapshot and self.request.sampling.logprobs is None and len(tokens) <= MAX_INLINE_TOKENS
        raw, ended = encode() if is_small else await asyncio.to_thread(encode)
        try:
            commit = Commit(
                expected_version=start.head.version,
                snapshot=raw,
                position=end.position,
                model_fingerprint=start.model.fingerprint,
                new_ids=new_ids,
                num_sampled=len(end.new_ids) - len(self.request.prompt_ids),
                seed=seed,
                turn=ended,
                tokenizer_fingerprint=start.tokenizer.fingerprint,
                numerics=start.model.numerics,
                energy_joules=self._session_joules(finished),
                after=start.after,
                num_before_border=num_before_border,
                snapshot_mark=SnapshotMark(to_store.header.version, to_store.header.position),
                replica=self.held.replica,
            )
            head = await self.held.commit(commit)
        except VersionConflict:
            self.metrics.sessions.commit_conflict()
            raise
        self.metrics.sessions.turn_committed(time.monotonic() - started, num_bytes=len(raw or b""))
        self.keeper.committed(head, snapshot, num_replayed=start.num_replayed, finished=finished, border=border)
        return head

    def _num_before_border(self, tokens: Sequence[StoredToken]) -> int | None:
        """New tokens that a next message goes on from, if the answer began with a thought; they are a version."""
        if not self.request.keep_states_at:
            return None
        border = self.request.keep_states_at[0]
        if border == len(self.request.prompt_ids):  # no thought is opened in the prompt
            first = [token.token_id for token in tokens[:MAX_THOUGHT_MARK]]
            if not begins_with_thought(self.start.tokenizer.decode(first)):
                return None
        return self.start.num_new(border)

    def _border_snapshot(self, created_at: float) -> Snapshot | None:
        """The state there; None if the engine gave none."""
        if not self.border_states:
            return None
        found, start = self.border_states[-1], self.start
        end = EndState(
            state=found.state,
            position=found.position,
            pending=None,
            new_ids=(),
            generated_counts=dict(start.generated_counts),
        )
        seed, state_format = self.request.sampling.seed, self.held.state_format
        return start.next_snapshot(end, seed=seed, created_at=created_at, state_format=state_format)

    def _session_joules(self, finished: Finished) -> float:
        return self.start.energy_joules + joules_of((finished,))

    def _ended(
        self,
        finished: Finished,
        tokens: Iterable[StoredToken],
        *,
        commit_point: CommitPoint | None = None,
        error: NsmError | None = None,
    ) -> EndedTurn:
        result = TurnResult(
            sampling=self.request.sampling,
            render_options=self.render_options,
            tokens=list(tokens),
            finished=finished,
            commit_point=commit_point,
            rebuilt=self.start.rebuilt,
            other_numerics=self.start.other_numerics,
            session_joules=0.0 if commit_point is None else self._session_joules(finished),
            error=error,
        )
        return EndedTurn(turn_id=self.turn.turn_id, result=encode_result(result), ttl_s=self.record_ttl_s)
