"""The events of one request between producer and reader, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from nsm_core.engine.request import Event, Finished, TokenEvent
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.engine.token_text import TokenText

# Takes the texts of tokens in place of the reader, or returns False and leaves the tokens to the reader.
TakeTokens = Callable[[Sequence[str]], bool]


class EventQueue:
    """A queue for one reader; the last event is a Finished. `max_tokens` bounds its length."""

    def __init__(self, pace: StreamPace | None = None, text: TokenText | None = None) -> None:
        """`pace`: of diverted tokens, and of those that are put by their ids; it may change before the first one.
        `text`: makes the text of all events, when they are read; without it they have theirs.
        """
        self.pace, self._text = pace, text
        self._take: TakeTokens | None = None
        self._is_paced = False  # some of the ready events wait for the pace
        self._num_others = 0  # ready events that are no tokens
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
        elif self._take is not None and self.pace is not None:
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

    def hand_on(self) -> bool:
        """The pace allows the tokens now. Whether the reader was woken for them."""
        self._is_paced = False
        is_waiting = self._waiter is not None and not self._waiter.done() and not self._is_holding
        may_take = is_waiting and not self._num_others and not self._with_text and self._take is not None
        if not self._ready or (may_take and self._is_taken()):
            return False
        return self._wake()

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
            ready, self._ready, self._num_others = self._ready, [], 0
            self._add_text(ready)
            batch, self._with_text = self._with_text, []
            is_over = isinstance(batch[-1], Finished)
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

    def _is_taken(self) -> bool:
        """Whether the ready events, which are all tokens, were taken in place of the reader."""
        ready, self._ready = self._ready, []
        ids = [token_id for token_id in ready if isinstance(token_id, int)] if self._text is not None else []
        if self._text is not None and len(ids) == len(ready):
            texts = self._text.texts(ids)
        else:
            self._add_text(ready)
            texts = [event.text for event in self._with_text if isinstance(event, TokenEvent)]
        is_taken = self._take is not None and self._take(texts)
        if is_taken:
            self._with_text = []
        elif self._text is not None and not self._with_text:
            self._with_text = self._text.events(ids, texts)
        return is_taken

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
