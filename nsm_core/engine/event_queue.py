"""The events of one request between producer and reader, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from nsm_core.engine.request import Event, Finished, TokenEvent
from nsm_core.engine.stream_pace import StreamPace, Write
from nsm_core.engine.token_text import TokenText

# Takes the ids and texts of tokens in place of the reader, and returns what writes them; None: it leaves them to the
# reader.
TakeTokens = Callable[[Sequence[int], Sequence[str]], Write | None]


class EventQueue:
    """A queue for one reader; the last event is a Finished. `max_tokens` bounds its length."""

    __slots__ = (
        *("_is_holding", "_is_paced", "_num_others", "_num_with_event", "_ready", "_take", "_text", "_waiter"),
        *("_with_text", "pace"),
    )

    def __init__(self, pace: StreamPace | None = None, text: TokenText | None = None) -> None:
        """`pace`: of diverted tokens, and of those that are put by their ids; it may change before the first one.
        `text`: makes the text of all events, when they are read; without it they have theirs.
        """
        self.pace, self._text = pace, text
        self._take: TakeTokens | None = None
        self._is_paced = False  # some of the ready events wait for the pace
        self._num_others = 0  # ready events that are no tokens
        self._num_with_event = 0  # ready tokens that are not there by their ids
        self._ready: list[Event | int] = []  # plain tokens may be there by their ids
        self._with_text: list[Event] = []  # events before those, to which text was added
        self._waiter: asyncio.Future[None] | None = None
        self._is_holding = False  # tokens do not wake the reader

    def put(self, event: Event) -> None:
        """On the reader's event loop."""
        self._ready.append(event)
        if not isinstance(event, TokenEvent):
            self._num_others += 1
            self._wake()
            return
        self._num_with_event += 1
        if self._take is not None and self.pace is not None:
            if not self._is_paced:
                self._is_paced = True
                self.pace.add(self)
        elif not self._is_holding:
            self._wake()

    def put_id(self, token_id: int) -> None:
        """`put` for a plain token, whose text is made here."""
        self._ready.append(token_id)
        if self.pace is not None:
            if not self._is_paced:
                self._is_paced = True
                self.pace.add(self)
        elif not self._is_holding:
            self._wake()

    def divert(self, take: TakeTokens) -> None:
        """From now on tokens that come while the reader waits are given to `take`, without waking the reader."""
        self._take = take

    def hand_on(self, writes: list[Write]) -> bool:
        """The pace allows the tokens now. Whether the reader was woken for them."""
        self._is_paced = False
        if not self._ready:
            return False
        take, waiter = self._take, self._waiter
        if take is None or waiter is None or self._is_holding or self._num_others or self._with_text or waiter.done():
            return self._wake()
        write = self._taken(take)
        if write is None:
            return self._wake()
        writes.append(write)
        return False

    async def events(self) -> AsyncIterator[Event]:
        """Each event once, in order."""
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self, *, hold_s: Callable[[], float] = lambda: 0.0) -> AsyncIterator[list[Event]]:
        """The same events in lists: each holds all events that are ready when the reader asks.

        Before each list the event loop runs other tasks once, so a slow reader gets longer lists. `hold_s` is called
        after the reader has handled tokens: tokens that arrive within so many seconds are collected, until an event
        arrives that is no token.
        """
        is_over = False
        while not is_over:
            await (asyncio.sleep(0) if self._ready or self._with_text else self._wait())
            ready, self._ready, self._num_others, self._num_with_event = self._ready, [], 0, 0
            self._add_text(ready)
            batch, self._with_text = self._with_text, []
            is_over = isinstance(batch[-1], Finished)
            if is_over:
                self._take = None  # it may refer to what refers to this queue
            yield batch
            if isinstance(batch[-1], TokenEvent) and self._num_others == 0:
                await self._hold(hold_s())

    async def _hold(self, seconds: float) -> None:
        if seconds <= 0:
            return
        timer = asyncio.get_running_loop().call_later(seconds, self._wake)
        self._is_holding = True
        try:
            await self._wait()
        finally:
            self._is_holding = False
            timer.cancel()

    def _taken(self, take: TakeTokens) -> Write | None:
        """What writes the ready events, which are all tokens, in place of the reader; None: they are left to it."""
        ready, self._ready = self._ready, []
        if self._text is None or self._num_with_event:
            self._num_with_event = 0
            self._add_text(ready)
            events = [event for event in self._with_text if isinstance(event, TokenEvent)]
            write = take([event.token_id for event in events], [event.text for event in events])
            if write is not None:
                self._with_text = []
            return write
        ids: list[int] = ready  # type: ignore[assignment]  # no other events are among them
        texts = self._text.texts(ids)
        write = take(ids, texts)
        if write is None:
            self._with_text = self._text.events(ids, texts)
        return write

    def _add_text(self, ready: Sequence[Event | int]) -> None:
        """The events, with their texts, join those that have one."""
        if self._text is None:
            self._with_text += ready  # type: ignore[arg-type]  # only where the text is made here are there ids
        else:
            self._with_text += map(self._text.event_of, ready)

    def _wake(self) -> bool:
        """Whether the reader waited."""
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
