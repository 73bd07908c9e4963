"""How often the tokens of streams are handed on: at once while the event loop keeps up, else several together."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

# Handing tokens on may take this share of the event loop's time; the rest is for requests that come and go.
SHARE = 0.25
MAX_INTERVAL_S = 0.02  # for servers: people do not see it, and the loop gathers several tokens in it
MEMORY = 8  # rounds, over which costs are averaged
LEAST_INTERVAL_S = 0.001  # of a timer; a shorter pause would not gather anything


class TokenReceiver(Protocol):
    """Holds tokens that wait to be handed on."""

    def hand_on(self) -> None:
        """All of them, now."""
        ...


class StreamPace:
    """Gathers the tokens of streams, so that all of them together take at most SHARE of the event loop's time.

    With S streams whose tokens cost c seconds to hand on, a round takes S * c. Rounds begin at least S * c / SHARE and
    at most `max_interval_s` after each other. If steps of the engine take longer than that, every token is handed on as
    it comes. `max_interval_s` = 0: always. All methods belong to one event loop.
    """

    def __init__(self, max_interval_s: float = 0.0) -> None:
        self._max_interval_s = max_interval_s
        self._waiting: list[TokenReceiver] = []
        self._round_s = 0.0  # what a round takes
        self._last_round_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def interval_s(self) -> float:
        """The least time between two rounds at present."""
        interval_s = min(self._max_interval_s, self._round_s / SHARE)
        return interval_s if interval_s >= LEAST_INTERVAL_S else 0.0

    def add(self, receiver: TokenReceiver) -> None:
        """The receiver has tokens; once a round."""
        self._waiting.append(receiver)

    def step_ended(self) -> None:
        """All tokens of a step of the engine were added."""
        if self._timer is not None or not self._waiting:
            return
        now = time.monotonic()
        wait_s = self._last_round_at + self.interval_s - now
        if wait_s <= 0.0:
            self._hand_on(now)
        else:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._hand_on_late)

    def _hand_on_late(self) -> None:
        self._timer = None
        self._hand_on(time.monotonic())

    def _hand_on(self, now: float) -> None:
        receivers, self._waiting = self._waiting, []
        for receiver in receivers:
            receiver.hand_on()
        self._last_round_at = now
        self._round_s += (time.monotonic() - now - self._round_s) / MEMORY
