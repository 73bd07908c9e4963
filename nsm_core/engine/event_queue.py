"""The events of one request between producer and reader, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from nsm_core.engine.request import Event, Finished, TokenEvent
from nsm_core.engine.stream_pace import StreamPace

# Takes tokens in place of the reader, or returns False and leaves them to the reader.
TakeTokens = Callable[[Sequence[TokenEvent]], bool]


class EventQueue:
    """A queue for one reader; the last event is a Finished. `max_tokens` bounds its length."""

    def __init__(self, pace: StreamPace | None = None) -> None:
        """`pace`: of diverted tokens."""
        self._pace = pace
        self._take: TakeTokens | None = None
        self._is_paced = False  # some of the ready events wait for the pace
        self._num_others = 0  # ready events that are no tokens
        self._ready: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_holding = False  # tokens do not wake the reader

    def put(self, event: Event) -> None:
        """On the reader's event loop."""
        self._ready.append(event)
        if not isinstance(event, TokenEvent):
            self._num_others += 1
            self._wake()
        elif self._take is not None and self._pace is not None:
            if not self._is_paced:
                self._is_paced = True
                self._pace.add(self)
        elif not self._is_holding:
            self._wake()

    def divert(self, take: TakeTokens) -> None:
        """From now on tokens that come while the reader waits are given to `take`, without waking the reader."""
        self._take = take

    def hand_on(self) -> None:
        """The pace of diverted tokens allows them now."""
        self._is_paced = False
        tokens = self._ready
        is_waiting = self._waiter is not None and not self._waiter.done() and not self._is_holding
        if tokens and is_waiting and not self._num_others and self._take is not None:
            self._ready = []
            if self._take(tokens):  # type: ignore[arg-type]  # there are no other events among them
                return
            self._ready = tokens
        if self._ready:
            self._wake()

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
            await (asyncio.sleep(0) if self._ready else self._wait())
            batch, self._ready, self._num_others = self._ready, [], 0
            is_over = isinstance(batch[-1], Finished)
            yield batch
            if isinstance(batch[-1], TokenEvent) and all(isinstance(event, TokenEvent) for event in self._ready):
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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
