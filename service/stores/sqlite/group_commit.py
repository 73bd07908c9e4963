"""Short writes that wait at the same time share one transaction: its commit costs the same for one as for many.

Each has its own result or error, which it gets after the common commit. While another process writes,
those that come wait together: they are in the next transaction, not in the one after.
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
from service.stores.sqlite.connection import (
    ConnectionThread,
    LockTaken,
    Result,
    Work,
    end_future,
    not_waiting,
    shared_transaction,
)
from service.stores.sqlite.schema import is_busy

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

    def _outcomes(self, writes: list[_Write]) -> Sequence[_Outcome]:
        """Of `writes`, to which those are added that come while they wait for another process."""
        if len(writes) == 1:
            with contextlib.suppress(LockTaken):
                return [self._alone_outcome(writes[0], waits=False)]
        outcomes: list[_Outcome] | None = None
        try:
            outcomes = self._thread.call(lambda connection: self._together(connection, writes))
        except Exception as error:  # of one of them, or a full disk: then each is made by itself
            if is_locked(error):
                return [_Outcome(error=error)] * len(writes)  # they have waited
        if outcomes is None:
            return [self._alone_outcome(write) for write in writes]
        try:
            self._thread.call(self._acknowledge)
        except NsmError as error:
            return [_Outcome(error=error)] * len(writes)
        return outcomes

    def _together(self, connection: sqlite3.Connection, writes: list[_Write]) -> list[_Outcome] | None:
        """None, or an exception: nothing was written."""
        if not self._begin(connection):
            return None
        with shared_transaction(connection, is_synced=functools.partial(self._join, writes)):
            return [_outcome(functools.partial(write.work, connection), raised=sqlite3.Error) for write in writes]

    def _join(self, writes: list[_Write]) -> bool:
        """Adds those that have come since. Returns whether one of all has to be on the disk."""
        while self._waiting and len(writes) < MAX_WRITES:
            writes.append(self._waiting.popleft())
        return any(write.is_synced for write in writes)

    def _alone_outcome(self, write: _Write, *, waits: bool = True) -> _Outcome:
        """Of a write made by itself. Raises LockTaken where it would have to wait and must not."""

        def work(connection: sqlite3.Connection) -> Any:
            with contextlib.nullcontext() if waits else not_waiting(connection):
                return write.alone(connection, write.work)

        return _outcome(functools.partial(self._thread.call, work), raised=LockTaken)


def is_locked(error: Exception) -> bool:
    """Whether a write was given up because another process wrote all the time."""
    return isinstance(error.__cause__, sqlite3.Error) and is_busy(error.__cause__)


def _outcome(work: Callable[[], Any], *, raised: type[Exception]) -> _Outcome:
    """Of the work, at once. `raised`: errors that are none."""
    try:
        return _Outcome(work())
    except raised:
        raise
    except Exception as error:
        return _Outcome(error=error)


def _set_outcomes(writes: Sequence[_Write], outcomes: Sequence[_Outcome]) -> None:
    for write, outcome in zip(writes, outcomes, strict=True):
        end_future(write.done, outcome.result, outcome.error)
