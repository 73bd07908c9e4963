"""How often the tokens of streams are handed on: at once while the event loop keeps up, else several together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

# Handing tokens on may take this share of the event loop's time; the rest is for requests that come and go.
SHARE = 0.25
MAX_INTERVAL_S = 0.02  # for servers: people do not see it, and the loop gathers several tokens in it
MEMORY = 8  # rounds, over which costs are averaged
READER_TURNS = 3  # of the event loop, in which a reader that was woken has written its tokens
LEAST_INTERVAL_S = 0.001  # of a timer; a shorter pause would not gather anything


Write = Callable[[], object]  # writes what a round made of one stream's tokens


class TokenReceiver(Protocol):
    """Holds tokens that wait to be handed on."""

    def hand_on(self, writes: list[Write]) -> bool:
        """All of them, now; what is to be written of them joins `writes`. Whether a reader was woken, which does the
        work in its own task.
        """
        ...


class StreamPace:
    """Gathers the tokens of streams, so that all of them together take at most SHARE of the event loop's time.

    With S streams whose tokens cost c seconds to hand on, a round takes S * c; tasks that tokens wake are part of it.
    Rounds begin at least S * c / SHARE and at most `max_interval_s` after each other. If steps of the engine take
    longer than that, every token is handed on as it comes. `max_interval_s` = 0: always. All methods belong to one
    event loop.
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
        has_woken, writes = False, list[Write]()
        try:
            for receiver in receivers:
                has_woken |= receiver.hand_on(writes)
        finally:
            for write in writes:  # one after the other: the interpreter's code and the kernel's share small caches
                write()
        self._last_round_at = now
        self._end_round(now, READER_TURNS if has_woken and self._max_interval_s else 0)

    def _end_round(self, started: float, num_turns: int) -> None:
        """After so many turns of the loop: they are busy with the readers that were woken."""
        if num_turns:
            asyncio.get_running_loop().call_soon(self._end_round, started, num_turns - 1)
        else:
            self._round_s += (time.monotonic() - started - self._round_s) / MEMORY
