"""One turn as its client sees it: events until the end, whoever stops it, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Literal

from nsm_core.engine.request import Finished, FinishReason, PromptScored, TokenEvent
from nsm_core.errors import NsmError, Overloaded, TurnCancelled
from service.backends.base import Generation
from service.continuation import Continuation
from service.metrics import Metrics, RequestRecord
from service.replay import RebuildReason
from service.sessions.base import SessionHead
from service.tenants import Permit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The last event of every turn. `head` is the session's after it.

    `error` is None if and only if the turn was committed; otherwise the session is where it was.
    """

    finished: Finished
    head: SessionHead
    error: NsmError | None = None


TurnEvent = PromptScored | TokenEvent | TurnEnd


class Turn:
    """A turn of one session, from the claim to its end. Made by `Turns.open_turn`; whoever leaves it calls `detach`."""

    def __init__(self, metrics: Metrics, *, detached_s: float) -> None:
        self.ended = asyncio.Event()
        self.end: TurnEnd | None = None
        self.other_numerics: str | None = None  # see Continuation, as for the next
        self.rebuilt: RebuildReason | None = None
        self.permit: Permit | None = None
        self.has_written = False  # what was no turn but held the session as one has changed it
        self._metrics = metrics
        self._detached_s = detached_s
        self._generation: Generation | None = None
        self._record: RequestRecord | None = None
        self._stop_error: NsmError | None = None
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

    def delivered(self, at: float | None = None) -> None:
        """Text reached the client's connection, now or at a `time.monotonic()` reading; the first time is measured."""
        if self._record is not None:
            self._record.delivered(at)

    def detach(self) -> None:
        """The client left: the turn may go on for `detached_s` seconds. Idempotent; nothing after the end."""
        if not self.ended.is_set() and self._timer is None:
            late = TurnCancelled(f"the turn was stopped: its client had left {self._detached_s:g} seconds before")
            self._timer = asyncio.get_running_loop().call_later(self._detached_s, self.stop, late)
            self._metrics.turn_detached(1)

    def stop(self, error: NsmError) -> None:
        """End within a step, with `error`, and keep nothing. Only the first call counts; too late once committing."""
        if self._stop_error is None:
            self._stop_error = error
            if self._generation is not None:
                self._generation.cancel()

    # What follows is for `Turns`.

    def begin(self, generation: Generation, start: Continuation, record: RequestRecord) -> None:
        """The engine admitted the turn."""
        self._record = record
        self.other_numerics = start.other_numerics
        self.rebuilt = start.rebuilt
        self.attach(generation)

    def attach(self, generation: Generation) -> None:
        """What `stop` is to cancel."""
        self._generation = generation
        if self._stop_error is not None:  # it came while the session was being loaded
            generation.cancel()

    def put(self, event: TokenEvent | PromptScored) -> None:
        """An event for the client, if it is still there."""
        if self._record is not None and isinstance(event, TokenEvent):
            self._record.token()
        self._events.put_nowait(event)

    def error_of(self, finished: Finished) -> NsmError | None:
        """Why a turn that ended so is not committed; None if it is to be."""
        if finished.reason is FinishReason.ERROR:
            return finished.error or NsmError("the engine failed on this request")
        if finished.reason is FinishReason.ABORT:
            return self._stop_error or stopping()
        return None

    def finish(self, end: TurnEnd | None) -> None:
        """The session is free again; `end` is None when the turn was refused."""
        if self._timer is not None:
            self._timer.cancel()
            self._metrics.turn_detached(-1)
        if self.permit is not None:
            self.permit.leave()
        self.end = end
        self.ended.set()
        if end is not None:
            self._events.put_nowait(end)
            self._count(end)

    def _count(self, end: TurnEnd) -> None:
        if self._record is not None:
            finished = end.finished
            self._record.finish(
                _reason(end), prompt_tokens=finished.prompt_tokens, completion_tokens=finished.completion_tokens
            )


def stopping() -> Overloaded:
    """What a turn meets when the server goes down."""
    return Overloaded("the server is stopping; nothing of this turn was kept")


def _reason(end: TurnEnd) -> Literal["stop", "length", "abort", "error"]:
    if end.finished.reason is FinishReason.ABORT:
        return "abort"
    if end.error is not None:
        return "error"
    return "stop" if end.finished.reason is FinishReason.STOP else "length"
