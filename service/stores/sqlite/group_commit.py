"""Short writes that wait at the same time share one transaction: its commit costs the same for one as for many.

Each keeps its own result or error, and hears of it after the commit that has them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from nsm_core.errors import NsmError
from service.stores.sqlite.connection import ConnectionThread, Result, Work, shared_transaction

MAX_WRITES = 64  # in one transaction
Alone = Callable[[sqlite3.Connection, Work[Any]], Any]  # makes a write with all that belongs to it


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    result: Any = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Write:
    work: Work[Any]
    is_synced: bool
    alone: Alone
    done: asyncio.Future[Any]

    def end(self, outcome: _Outcome) -> None:
        """On the loop. A caller that was cancelled hears nothing."""
        if self.done.done():
            return
        if outcome.error is None:
            self.done.set_result(outcome.result)
        else:
            self.done.set_exception(outcome.error)


class GroupCommit:
    """Gathers the writes of one event loop for the thread of one connection.

    `alone` makes one write by itself. `begin` and `acknowledge` come before and after the transaction
    of several; `begin` tells whether there may be one. All may raise our errors and SQLite's.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        *,
        alone: Alone,
        begin: Callable[[sqlite3.Connection], bool],
        acknowledge: Callable[[sqlite3.Connection], None],
    ) -> None:
        self._thread = thread
        self._alone, self._begin, self._acknowledge = alone, begin, acknowledge
        self._waiting: deque[_Write] = deque()

    async def run(self, work: Work[Result], *, is_synced: bool, alone: Alone | None = None) -> Result:
        """`work` in the thread, to its end even when the caller is cancelled. Raises its errors; SQLite's come as ours.

        It may run twice: the first run is then taken back. `is_synced`: as `transaction`, not `unsynced_transaction`.
        `alone`: instead of that of all writes.
        """
        loop = asyncio.get_running_loop()
        write = _Write(work, is_synced, alone or self._alone, loop.create_future())
        self._waiting.append(write)
        if len(self._waiting) == 1:  # else the thread is called already, or will look again
            try:
                self._thread.start(lambda: self._run_waiting(loop))
            except RuntimeError:  # the thread has ended
                self._waiting.clear()
                raise
        result: Result = await write.done
        return result

    def _run_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread. A write that comes meanwhile is the first of the next group, or in this one."""
        while writes := [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_WRITES))]:
            outcomes = self._outcomes(writes)
            with contextlib.suppress(RuntimeError):  # the loop was closed before: nobody waits
                loop.call_soon_threadsafe(_set_outcomes, writes, outcomes)

    def _outcomes(self, writes: Sequence[_Write]) -> Sequence[_Outcome]:
        outcomes: list[_Outcome] | None = None
        if len(writes) > 1:
            with contextlib.suppress(Exception):  # of one of them, or a full disk: then each is made by itself
                outcomes = self._thread.call(lambda connection: self._together(connection, writes))
        if outcomes is None:
            return [_outcome(functools.partial(self._thread.call, self._by_itself(write))) for write in writes]
        try:
            self._thread.call(self._acknowledge)
        except NsmError as error:
            return [_Outcome(error=error)] * len(writes)
        return outcomes

    def _together(self, connection: sqlite3.Connection, writes: Sequence[_Write]) -> list[_Outcome] | None:
        """None, or an exception: nothing was written."""
        if not self._begin(connection):
            return None
        with shared_transaction(connection, is_synced=any(write.is_synced for write in writes)):
            return [_outcome(functools.partial(write.work, connection), raised=sqlite3.Error) for write in writes]

    def _by_itself(self, write: _Write) -> Work[Any]:
        return lambda connection: write.alone(connection, write.work)


def _outcome(work: Callable[[], Any], *, raised: type[Exception] | tuple[()] = ()) -> _Outcome:
    """Of the work, at once. `raised`: errors that are none."""
    try:
        return _Outcome(work())
    except raised:
        raise
    except Exception as error:
        return _Outcome(error=error)


def _set_outcomes(writes: Sequence[_Write], outcomes: Sequence[_Outcome]) -> None:
    for write, outcome in zip(writes, outcomes, strict=True):
        write.end(outcome)
