"""A gateway's connection to an engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsm_core.wire import local as wire


class EngineLink(asyncio.Protocol):
    """`first`: the engine's first message, ConnectionError if it left before. `take` gets the others, in the very call
    of the loop that has read them: tokens then need no task to wake. `lost`: the engine has left.
    """

    def __init__(self, take: Callable[[wire.ToGateway], None]) -> None:
        """On the loop."""
        self._take = take
        self._messages = wire.MessagesToGateway()
        self.first: asyncio.Future[wire.ToGateway] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """An error here ends the connection."""
        for message in self._messages.feed(data):
            if self.first.done():
                self._take(message)
            else:
                self.first.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.first.done():
            self.first.set_exception(error or ConnectionResetError("the engine's process left"))
        self.lost.set()
