"""Reads turns that do not run in this process: their stored results, or the records of another process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from nsm_core.engine.request import TokenEvent
from nsm_core.errors import NotFound, TurnCancelled
from nsm_core.tokenizer import Tokenizer
from service.messages import quoted
from service.stores.sessions.base import SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.turn_records import TurnRecord
from service.turns.codec import CommitPoint, StoredToken, TurnResult, decode_request, decode_result, decode_tokens
from service.turns.detokenize import EventReplayer
from service.turns.token_writer import happens
from service.turns.turn import EVENTS_AT_ONCE, HandedOver, Turn, TurnEvent, TurnOutcome

POLL_S = 0.1  # how often the record of a turn in another process is looked at

TakeOver = Callable[[SessionKey, str], Awaitable[Turn | None]]


def stream_not_found(turn_id: str) -> NotFound:
    """The same answer for a stream that never was, has expired, or is another tenant's."""
    return NotFound(f"stream {quoted(turn_id, 160)} does not exist", param="stream_id", code="stream_not_found")


class TurnFollower:
    """A TurnSource that reads a record, also while it grows.

    When the record's holder is lost, `take_over(key, turn_id)` continues the turn: it gives the turn
    that then runs in this process, None when somebody else has it. `has_stopped`: set when this process ends.
    """

    is_replay = True

    def __init__(
        self,
        store: SessionStore,
        tokenizer: Tokenizer,
        record: TurnRecord,
        key: SessionKey,
        *,
        take_over: TakeOver,
        has_stopped: asyncio.Event,
    ) -> None:
        self.turn_id = record.turn_id
        self.render_options: Mapping[str, Any] = {}
        self.end: TurnOutcome | None = None
        self.rebuilt: str | None = None
        self.other_numerics: str | None = None
        self._store = store
        self._key = key
        self._record = record
        self._take_over = take_over
        self._has_stopped = has_stopped
        self._taken: Turn | None = None
        self._num_chunks = 0
        self._replayer: EventReplayer | None = None
        self._result_read: TurnResult | None = None
        if record.request:
            request, _ = decode_request(record.request, key, turn_id=record.turn_id)
            self._replayer, self.render_options = EventReplayer(tokenizer, request.sampling), request.render_options
        elif record.result is not None:
            self._result_read = result = decode_result(record.result)
            self._replayer, self.render_options = EventReplayer(tokenizer, result.sampling), result.render_options

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self) -> AsyncGenerator[list[TurnEvent], None]:
        try:
            while self._record.status == "running":
                async for batch in self._frames(self._new_tokens()):
                    yield batch
                if not self._record.lease_left_s:
                    turn = await self._take_over(self._key, self.turn_id)
                    if turn is not None:
                        async for batch in self._taken_batches(turn):
                            yield batch
                        return
                await self._wait_for_more()
            result = await self._result()
            async for batch in self._frames(result.tokens[self._num_tokens :]):
                yield batch
            self.end = await self._end_of(result)
            yield [self.end]
        finally:
            self.detach()

    def delivered(self, at: float | None = None) -> None:
        """Only the opener's time to first text is measured."""

    def detach(self) -> None:
        if self._taken is not None:
            self._taken.detach()

    @property
    def _num_tokens(self) -> int:
        return 0 if self._replayer is None else self._replayer.num_tokens

    def _new_tokens(self) -> list[StoredToken]:
        self._num_chunks += len(self._record.chunks)
        return [token for chunk in self._record.chunks for token in decode_tokens(chunk)]

    async def _frames(self, tokens: Sequence[StoredToken]) -> AsyncGenerator[list[TurnEvent], None]:
        if self._replayer is None:
            raise RuntimeError("a turn without a request or a result has no tokens")
        for start in range(0, len(tokens), EVENTS_AT_ONCE):
            yield [self._replayer.feed(token) for token in tokens[start : start + EVENTS_AT_ONCE]]
            await asyncio.sleep(0)

    async def _wait_for_more(self) -> None:
        if await happens(self._has_stopped, within_s=POLL_S):
            raise HandedOver
        record = await self._store.get_turn(
            self._key,
            turn_id=self.turn_id,
            first_chunk=self._num_chunks,
            with_request=False,
        )
        if record is None:
            raise stream_not_found(self.turn_id)
        self._record = record

    async def _taken_batches(self, turn: Turn) -> AsyncGenerator[list[TurnEvent], None]:
        """The events after those that were given out already."""
        self._taken, num_given = turn, self._num_tokens
        async for batch in turn.batches():
            if isinstance(batch[-1], TurnOutcome):
                self.end, self.rebuilt, self.other_numerics = batch[-1], turn.rebuilt, turn.other_numerics
            new = [event for event in batch if not isinstance(event, TokenEvent) or event.index > num_given]
            if new:
                yield new

    async def _result(self) -> TurnResult:
        if self._result_read is not None:
            return self._result_read
        if self._record.result is None:
            what = "was cancelled" if self._record.status == "cancelled" else "was lost with the server that ran it"
            raise TurnCancelled(f"the turn {what}; nothing of it was kept")
        return await asyncio.to_thread(decode_result, self._record.result)

    async def _end_of(self, result: TurnResult) -> TurnOutcome:
        if self._replayer is None:
            raise RuntimeError("a turn without a request or a result has no end")
        self.rebuilt, self.other_numerics = result.rebuilt, result.other_numerics
        head = await self._store.get(self._key)
        finished = self._replayer.finish(result.finished)
        return TurnOutcome(
            finished=finished,
            head=head_at(head, result.commit_point),
            session_joules=result.session_joules,
            error=result.error,
        )


def head_at(head: SessionHead, commit_point: CommitPoint | None) -> SessionHead:
    """The head as a turn left it that is not the newest any more."""
    return head if commit_point is None else dataclasses.replace(head, **dataclasses.asdict(commit_point))
