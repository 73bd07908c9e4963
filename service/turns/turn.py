"""One turn as its clients see it: events until the end, stops, and its course after the clients leave."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from nsm_core.engine.request import Finished, FinishReason, TokenEvent
from nsm_core.engine.stream_pace import Write
from nsm_core.errors import LeaseLost, NsmError, ServerStopping, TurnCancelled
from service.backends.base import Generation
from service.state.rebuild import RebuildReason
from service.state.resume import ResumedSession, TurnRequest
from service.stores.sessions.base import SessionHead
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.requests import RequestRecord
from service.tenants.tenants import Permit

EVENTS_AT_ONCE = 64  # most that a reader gets in one piece


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """The last event of every turn. `head` is the session's after it.

    `error` is None if and only if the turn was committed; otherwise the session is where it was. HandedOver: the turn
    itself has not ended, only here. `session_joules`: of a committed turn and all before it, as far as it was measured.
    """

    finished: Finished
    head: SessionHead
    session_joules: float = 0.0
    error: NsmError | None = None


TurnEvent = TokenEvent | TurnOutcome
# Makes what writes texts of tokens, the first of which has this number; None: the connection cannot take them now
ShowTokens = Callable[[int, Sequence[str]], Write | None]
_ShownToken = tuple[int, int, str]  # number, id and text of a token that was shown: an event, where anybody asks for it


class TurnSource(Protocol):
    """A source of a turn's events: the turn itself, a follower, or its stored result."""

    @property
    def turn_id(self) -> str: ...

    @property
    def render_options(self) -> Mapping[str, Any]:
        """The request's values, see TurnRequest."""
        ...

    @property
    def is_replay(self) -> bool:
        """Whether the turn had begun before this reader asked for it."""
        ...

    @property
    def end(self) -> TurnOutcome | None:
        """Set before the last event is given out."""
        ...

    @property
    def rebuilt(self) -> str | None: ...

    @property
    def other_numerics(self) -> str | None: ...

    def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Each event of the turn once, in order from its first, the last a TurnOutcome. Closing it early detaches.

        Raises NsmError where the events cannot be had any more.
        """
        ...

    def batches(self) -> AsyncGenerator[list[TurnEvent], None]:
        """The same events, in batches: those that are there when the reader comes for more, up to a bound. Between two
        batches others get the event loop.
        """
        ...

    def delivered(self, at: float | None = None) -> None:
        """Text reached the client's connection, now or at a `time.monotonic()` reading."""
        ...

    def detach(self) -> None:
        """This reader left. Idempotent, never blocks."""
        ...


class Turn:
    """A turn of one session, from its reservation to its end. Made by `TurnRegistry.open_turn`; a reader that leaves
    calls `detach`.

    It is its opener's TurnSource; `follow` gives further ones. Without any reader it goes on for `detached_s` seconds.
    `identity`, `digest`: see TurnStart.
    """

    def __init__(self, metrics: Metrics, *, detached_s: float, identity: str | None = None, digest: str = "") -> None:
        self.identity = identity
        self.digest = digest
        self.turn_id = ""  # until it has begun
        self.is_replay = False
        self.render_options: Mapping[str, Any] = {}
        self.begun = asyncio.Event()  # or refused
        self.ended = asyncio.Event()
        self.end: TurnOutcome | None = None
        self.other_numerics: str | None = None  # see ResumedSession, as for the next
        self.rebuilt: RebuildReason | None = None
        self.permit: Permit | None = None
        self.has_written = False  # an exclusive operation has changed the session
        self.is_resumable = False  # see TurnRequest
        self._metrics = metrics
        self._detached_s = detached_s
        self._generation: Generation | None = None
        self._record: RequestRecord | None = None
        self._stop_error: NsmError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._events: list[TurnEvent | _ShownToken] = []
        self._news = asyncio.Event()
        self._num_readers = 1
        self._has_opener = True
        self._opener = _Reading()
        self._show: ShowTokens | None = None

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Each event once, in order, the last a TurnOutcome. Closing it early detaches."""
        try:
            async for event in self.all_events():
                yield event
        finally:
            self.detach()

    async def batches(self) -> AsyncGenerator[list[TurnEvent], None]:
        """See TurnSource."""
        try:
            async for batch in self.all_batches(self._opener):
                yield batch
        finally:
            self.detach()

    async def all_events(self) -> AsyncGenerator[TurnEvent, None]:
        """From the first one; any number of readers may be at it."""
        async for batch in self.all_batches():
            for event in batch:
                yield event

    async def all_batches(self, reading: _Reading | None = None) -> AsyncGenerator[list[TurnEvent], None]:
        """The same for those who can use several at once. `reading`: the reader's own."""
        reading = reading or _Reading()
        while True:
            if reading.num_read < len(self._events):
                await asyncio.sleep(0)  # a reader that is behind lets the others run
            while reading.num_read == len(self._events):
                self._news.clear()
                reading.is_waiting = True
                try:
                    await self._news.wait()
                finally:
                    reading.is_waiting = False
            batch = list(map(_event_of, self._events[reading.num_read : reading.num_read + EVENTS_AT_ONCE]))
            reading.num_read += len(batch)
            yield batch
            if isinstance(batch[-1], TurnOutcome):
                return

    def show_by(self, show: ShowTokens) -> None:
        """From now on tokens that come while the opener waits at `batches` may be shown by `show` in its place."""
        self._show = show

    def follow(self) -> Follower:
        """One more reader."""
        self._num_readers += 1
        if self._timer is not None:
            self._stop_timer()
        return Follower(self)

    def delivered(self, at: float | None = None) -> None:
        """Text reached the client's connection, now or at a `time.monotonic()` reading; the first time is measured."""
        if self._record is not None:
            self._record.delivered(at)

    def detach(self) -> None:
        """The opener left. When nobody reads any more, the turn may go on for `detached_s` seconds. Idempotent."""
        if self._has_opener:
            self._has_opener, self._show = False, None
            self.reader_left()

    def reader_left(self) -> None:
        """Once for each reader."""
        self._num_readers -= 1
        if not self._num_readers and not self.ended.is_set():
            late = TurnCancelled(f"the turn was stopped: its client had left {self._detached_s:g} seconds before")
            self._timer = asyncio.get_running_loop().call_later(self._detached_s, self.stop, late)
            self._metrics.sessions.turn_detached(1)

    def stop(self, error: NsmError) -> None:
        """End within a step, with `error`, and keep nothing. Only the first call counts; too late once committing."""
        if self._stop_error is None:
            self._stop_error = error
            if self._generation is not None:
                self._generation.cancel()

    # The rest is for `TurnRegistry`.

    def begin(
        self,
        generation: Generation,
        start: ResumedSession,
        record: RequestRecord,
        request: TurnRequest,
        *,
        earlier: Iterable[TokenEvent] = (),
    ) -> None:
        """The engine admitted the turn. `earlier`: what another process sampled of it."""
        self.turn_id = request.request_id
        self.render_options = request.render_options
        self.is_resumable = request.is_resumable or request.identity is not None
        self._record = record
        self.other_numerics = start.other_numerics
        self.rebuilt = start.rebuilt
        self._events += earlier
        self.attach(generation)
        self.begun.set()

    def begin_again(self, generation: Generation, start: ResumedSession) -> None:
        """It was admitted once more, maybe by another engine: the first one refused it, or ended."""
        self.other_numerics = start.other_numerics
        self.rebuilt = start.rebuilt
        self.attach(generation)

    def attach(self, generation: Generation) -> None:
        """Sets the generation that `stop` cancels."""
        self._generation = generation
        if self._stop_error is not None:  # it came while the session was being loaded
            generation.cancel()

    def give_up(self) -> None:
        """The server stops: a turn that can be read on elsewhere is left to whoever does, any other keeps nothing."""
        self.stop(HandedOver() if self.is_resumable else stopping())

    @property
    def is_stopped(self) -> bool:
        """Whether it must not go on here."""
        return self._stop_error is not None

    @property
    def is_handed_over(self) -> bool:
        return isinstance(self._stop_error, HandedOver)

    def put(self, events: Sequence[TokenEvent]) -> None:
        """For whoever reads."""
        if self._record is not None:
            for _ in events:
                self._record.token()
        self._events += events
        self._news.set()

    def show(self, first: int, ids: Sequence[int], texts: Sequence[str]) -> Write | None:
        """`put` without the opener's task, if it has all events and waits: what writes the texts of the tokens, from
        number `first` on, to its connection. None: nothing was put.
        """
        opener, num_events = self._opener, len(self._events)
        if self._show is None or not opener.is_waiting or opener.num_read != num_events:
            return None
        write = self._show(first, texts)
        if write is None:
            return None
        if self._record is not None:
            self._record.tokens(len(ids))
        if len(ids) == 1:
            self._events.append((first, ids[0], texts[0]))
        else:
            self._events += zip(range(first, first + len(ids)), ids, texts, strict=True)
        opener.num_read = len(self._events)
        if self._num_readers > 1:
            self._news.set()
        return write

    def error_of(self, finished: Finished) -> NsmError | None:
        """Why a turn that ended so is not committed; None if it is to be."""
        if finished.reason is FinishReason.ERROR:
            return finished.error or NsmError("the engine failed on this request")
        if finished.reason is FinishReason.ABORT:
            return self._stop_error or stopping()
        return None

    def finish(self, end: TurnOutcome | None) -> None:
        """The session is free again; `end` is None when the turn was refused."""
        self._stop_timer()
        if self.permit is not None:
            self.permit.leave()
        self.end, self._show = end, None
        self.ended.set()
        self.begun.set()
        if end is not None:
            self._events.append(end)
            self._news.set()
            self._count(end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._metrics.sessions.turn_detached(-1)

    def _count(self, end: TurnOutcome) -> None:
        if self._record is not None:
            self._record.finish(_reason(end), end.finished)


def _event_of(event: TurnEvent | _ShownToken) -> TurnEvent:
    if not isinstance(event, tuple):
        return event
    index, token_id, text = event
    return TokenEvent(index=index, token_id=token_id, text=text)


class _Reading:
    """How far a reader has come, and whether it waits for more."""

    __slots__ = ("is_waiting", "num_read")

    def __init__(self) -> None:
        self.num_read = 0
        self.is_waiting = False


class Follower:
    """A further reader of a turn that runs in this process: a TurnSource. Whoever leaves it calls `detach`."""

    is_replay = True

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._has_left = False
        self.turn_id = turn.turn_id
        self.render_options = turn.render_options
        self.rebuilt = turn.rebuilt
        self.other_numerics = turn.other_numerics

    @property
    def end(self) -> TurnOutcome | None:
        return self._turn.end

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        try:
            async for event in self._turn.all_events():
                yield event
        finally:
            self.detach()

    async def batches(self) -> AsyncGenerator[list[TurnEvent], None]:
        try:
            async for batch in self._turn.all_batches():
                yield batch
        finally:
            self.detach()

    def delivered(self, at: float | None = None) -> None:
        """Only the opener's time to first text is measured."""

    def detach(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._turn.reader_left()


class HandedOver(ServerStopping):
    """The server stops before the turn has ended. Its record still runs: another process continues it."""

    def __init__(self) -> None:
        super().__init__("the server is stopping; whoever reads on from another replica, or later, gets the rest")


class TakenOver(LeaseLost):
    """This process was not heard of for longer than its lease, and another one has continued the turn."""

    def __init__(self, turn_id: str, *, is_committed: bool) -> None:
        act = "has committed it" if is_committed else "continues it"
        super().__init__(
            f"this turn was taken over by another server, which {act}; GET /v1/streams/{turn_id} gives the rest"
        )


def stopping() -> ServerStopping:
    """The error of a turn that cannot be resumed when the server stops."""
    return ServerStopping("the server is stopping; nothing of this turn was kept")


def _reason(end: TurnOutcome) -> Literal["stop", "length", "abort", "error"]:
    if end.finished.reason is FinishReason.ABORT:
        return "abort"
    if end.error is not None:
        return "error"
    return "stop" if end.finished.reason is FinishReason.STOP else "length"
