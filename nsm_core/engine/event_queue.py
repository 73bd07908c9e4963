"""The events of one request between whoever makes them and the one who reads them, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nsm_core.engine.request import Event, Finished


class EventQueue:
    """Unbounded: what a request may sample bounds it. For one reader; the last event is a Finished."""

    def __init__(self) -> None:
        self._ready: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """On the reader's event loop."""
        self._ready.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def events(self) -> AsyncIterator[Event]:
        """Each event once, in order."""
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The same events, together all that are there when the reader comes for more.

        Before each batch others get the event loop once: a reader that is behind then finds more at the next try.
        """
        is_over = False
        while not is_over:
            await (asyncio.sleep(0) if self._ready else self._wait())
            batch, self._ready = self._ready, []
            is_over = isinstance(batch[-1], Finished)
            yield batch

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
