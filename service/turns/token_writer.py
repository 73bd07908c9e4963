"""Writes the sampled tokens of a running turn to its record, in small batches, and reads there of a cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from nsm_core.errors import LeaseLost, NotFound, NsmError, TurnCancelled
from service.turns.codec import StoredToken, encode_tokens
from service.turns.lease import HeldLease

logger = logging.getLogger("nsm.turns")

BATCH_S = 0.1  # between two appends; what a lost process had not written yet is drawn again, and comes out the same
SLOW_BATCH_S = 0.3  # while fewer than FEW_TOKENS come in BATCH_S: an append of three costs as much as one of thirty
FEW_TOKENS = 8
QUIET_S = 1.0  # how often a turn that samples nothing asks whether it shall go on


class TokenWriter:
    """The tokens of one turn, from its first on. `stop` ends the writing, and is to come before the record's end.

    `earlier`: what another process has written of it, in `num_chunks` chunks. `on_stop` is called when the turn must
    not go on: somebody cancelled it, or the lease is lost.
    """

    def __init__(
        self,
        held: HeldLease,
        turn_id: str,
        *,
        on_stop: Callable[[NsmError], None],
        earlier: Iterable[StoredToken] = (),
        num_chunks: int = 0,
    ) -> None:
        self.tokens = list(earlier)
        self.turn_id = turn_id
        self._held = held
        self._on_stop = on_stop
        self._num_chunks = num_chunks
        self._num_written = len(self.tokens)
        self._batch: bytes | None = None  # under way; sent again as it was when it may not have arrived
        self._batch_end = 0
        self._batch_s = BATCH_S
        self._has_more = False  # tokens that wait for the timer
        self._is_stopped = self._has_failed = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(QUIET_S, self._start_calling)
        self._calling: asyncio.Task[None] | None = None  # the store

    def put(self, tokens: Iterable[StoredToken]) -> None:
        self.tokens += tokens
        if not self._has_more:
            self._has_more = True
            if self._timer is not None:  # else the store is being called, which sets the next one
                self._set_timer()

    async def stop(self, *, is_complete: bool = False) -> None:
        """No write is under way when this returns. Idempotent.

        `is_complete`: write all that is left. What another process would draw again comes out the same on the same kind
        of machine only.
        """
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calling is not None:
            await asyncio.wait((self._calling,))
        try:
            while is_complete and self._num_written < len(self.tokens):
                await self._write()
        except NsmError as error:
            self._warn(error)

    def _set_timer(self) -> None:
        """For the next batch, or to listen. A timer and no task that waits: most turns end before it."""
        if self._timer is not None:
            self._timer.cancel()
        wait_s = _until_write_s(self._loop.time(), self._batch_s) if self._has_more else QUIET_S
        self._timer = self._loop.call_later(wait_s, self._start_calling)

    def _start_calling(self) -> None:
        self._timer, self._has_more = None, False
        self._calling = self._loop.create_task(self._call())

    async def _call(self) -> None:
        try:
            if self._is_stopped:
                return
            await (self._write() if self._num_written < len(self.tokens) else self._listen())
        except (LeaseLost, NotFound) as error:  # somebody else has the session, or it is gone
            self._on_stop(error)
            return
        except NsmError as error:  # the turn goes on: the next batch, or the commit, brings it
            self._warn(error)
        finally:
            self._calling = None  # a task that has ended refers to this object by its error
        if not self._is_stopped:
            self._set_timer()

    async def _write(self) -> None:
        if self._batch is None:
            self._batch_end = len(self.tokens)
            self._batch = encode_tokens(self.tokens[self._num_written :])
        is_cancel_wanted = await self._held.append_turn(self.turn_id, index=self._num_chunks, chunk=self._batch)
        is_slow = (self._batch_end - self._num_written) * BATCH_S < FEW_TOKENS * self._batch_s
        self._batch_s = SLOW_BATCH_S if is_slow else BATCH_S
        self._batch, self._num_written = None, self._batch_end
        self._num_chunks += 1
        self._has_failed = False
        self._heard(is_cancel_wanted)

    async def _listen(self) -> None:
        self._heard(await self._held.is_cancel_wanted(self.turn_id))

    def _heard(self, is_cancel_wanted: bool) -> None:
        if is_cancel_wanted:
            self._on_stop(TurnCancelled("the turn was cancelled; nothing of it was kept"))

    def _warn(self, error: NsmError) -> None:
        if not self._has_failed:
            logger.warning("the tokens of turn %s are not written down for now: %s", self.turn_id, error)
        self._has_failed = True


def _until_write_s(now: float, batch_s: float) -> float:
    """`batch_s`, give or take a half: all turns write at the same moments, which a store may commit together."""
    return batch_s - (now + batch_s / 2) % batch_s + batch_s / 2


async def happens(event: asyncio.Event, *, within_s: float) -> bool:
    """Waits for it; whether it came within the time."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
