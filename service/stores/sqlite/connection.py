"""Connections of the SQLite store, each in a thread of its own; transactions; SQLite's errors as ours."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from nsm_core.errors import NsmError, StorageFull, StoreDamaged, StoreUnavailable
from service.stores.sqlite.schema import MEMORY, StoreConnection, connect, connect_memory, is_busy
from service.stores.sqlite.write_gate import WriteGate

# How a transaction begins, is committed and taken back
_WHOLE = ("COMMIT", ("ROLLBACK",))
_PART = ("RELEASE part", ("ROLLBACK TO part", "RELEASE part"))
LOCK_POLL_S = 0.001  # between two looks at a lock that another process holds
GATE_PATIENCE_S = 0.01  # for which a closed gate is believed
GATHER_S = 0.001  # for which a result waits for the next ones: the loop wakes once for all
NO_TABLE = "no such table"  # SQLite has no code of its own for it
FULL = "the session store is full: delete sessions, or free its disk"
DAMAGED = "the session store is damaged or not a database"
Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]


class LockTaken(Exception):
    """Another process has the write lock, and the connection does not wait for it."""


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """Work for the thread, and where its result goes."""

    work: Work[Any]
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


def end_future(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """On the loop. A caller that was cancelled hears nothing."""
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


class ConnectionThread:
    """A connection and the one thread that uses it. `file`: for the notes of errors. `has_met_damage`: in the file, in
    any call so far: nothing repairs it under an open store.
    """

    def __init__(self, name: str, *, connect: Callable[[], sqlite3.Connection], file: Path) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"nsm-{name}")
        self._connect = connect
        self._file = file
        self._connection: sqlite3.Connection | None = None
        self._waiting: deque[_Call] = deque()
        self.has_met_damage = False

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """`work` in the thread, to its end even when the caller is cancelled; SQLite's errors come out as ours."""
        call = _Call(work, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:  # else the thread is called already, or will look again
            try:
                self.start(self._run_waiting)
            except RuntimeError:  # the thread has ended
                self._waiting.clear()
                raise
        result: Result = await call.done
        return result

    def _run_waiting(self) -> None:
        """In the thread. Results that come within GATHER_S wake the loop once."""
        while self._waiting:
            ended: list[_Call] = []
            loop, end = self._waiting[0].done.get_loop(), time.monotonic() + GATHER_S
            while self._waiting and time.monotonic() < end and self._waiting[0].done.get_loop() is loop:
                call = self._waiting.popleft()
                try:
                    call.result = self.call(call.work, is_careful=True)
                except Exception as error:
                    call.error = error
                ended.append(call)
            with contextlib.suppress(RuntimeError):  # the loop was closed before: nobody waits
                loop.call_soon_threadsafe(_end_calls, ended)

    def start(self, work: Callable[[], None]) -> None:
        """`work` in the thread, after what was started before; it must not raise. Raises RuntimeError after `close`."""
        self._executor.submit(work)

    def call(self, work: Callable[[sqlite3.Connection], Result], *, is_careful: bool = False) -> Result:
        """`work`, in the thread, which is this one; SQLite's errors come out as ours. `is_careful`: it may have
        statements outside of transactions, which wait for locks and for the disk.
        """
        try:
            if self._connection is None:
                self._connection = self._connect()
            if is_careful:
                _be_careful(self._connection)
            return work(self._connection)
        except sqlite3.Error as error:
            translated = _translate(error, self._file)
            self.has_met_damage |= isinstance(translated, StoreDamaged)
            raise translated from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        self._executor.shutdown()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _end_calls(calls: Iterable[_Call]) -> None:
    for call in calls:
        end_future(call.done, call.result, call.error)


def file_thread(name: str, path: Path, *, busy_timeout_s: float) -> ConnectionThread:
    """A thread on the sessions' file."""
    return ConnectionThread(f"store-{name}", connect=lambda: connect(path, busy_timeout_s=busy_timeout_s), file=path)


def memory_thread() -> ConnectionThread:
    """A thread on a database of its own, in memory."""
    return ConnectionThread("store", connect=connect_memory, file=Path(MEMORY))


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, and on the disk at its end. The write lock is taken at the start, so that reads inside are still
    true then.
    """
    with _committed(connection):
        yield
        if isinstance(connection, StoreConnection):  # nothing of a database in memory is there after a restart
            connection.execute("UPDATE usage SET stamp = stamp + 1 WHERE tenant = ''")


@contextlib.contextmanager
def unsynced_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that the death of the process cannot take back, but a power cut can: it waits for no disk. So the
    stamp, which says what a restart must find, stays.
    """
    with _committed(connection, is_synced=_never):
        yield


@contextlib.contextmanager
def shared_transaction(connection: sqlite3.Connection, *, is_synced: Callable[[], bool]) -> Iterator[None]:
    """The transactions inside are parts of one, which commits them all at its end. One that raises is taken back alone,
    if its error is caught; errors of SQLite must not be.

    `is_synced`: whether the end has to be on the disk. It is asked before each try to take SQLite's write lock.
    """
    with _committed(connection, is_synced=is_synced):
        yield


def _always() -> bool:
    return True


def _never() -> bool:
    return False


@contextlib.contextmanager
def not_waiting(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction inside raises LockTaken instead of waiting for another process."""
    if not isinstance(connection, StoreConnection):
        raise TypeError("only a connection of `schema.connect` can be told not to wait")
    connection.waits_for_lock = False
    try:
        yield
    finally:
        connection.waits_for_lock = True


@contextlib.contextmanager
def _committed(connection: sqlite3.Connection, *, is_synced: Callable[[], bool] = _always) -> Iterator[None]:
    """Within a transaction that is under way it is a part of that one. `is_synced`: see `shared_transaction`."""
    is_part = connection.in_transaction
    commit, rollback = _PART if is_part else _WHOLE
    if is_part:
        connection.execute("SAVEPOINT part")
    else:
        _begin_writing(connection, is_synced)
    try:
        yield
        connection.execute(commit)
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself after some errors, a full disk among them
            for statement in rollback:
                connection.execute(statement)
        raise
    finally:
        gate = _gate_of(connection)
        if gate is not None and not is_part:
            gate.leave()


def _begin_writing(connection: sqlite3.Connection, is_synced: Callable[[], bool]) -> None:
    """Waits for other processes as long as the connection may, but with short pauses: SQLite's own grow to 0.1 s, so
    that of many processes some wait for seconds while the lock is often free.
    """
    if not isinstance(connection, StoreConnection):  # in memory: there is no other process, and no disk
        connection.execute("BEGIN IMMEDIATE")
        return
    last_try = time.monotonic() + connection.patience_s
    connection.set_patient(False)
    gate = connection.gate
    try:
        while True:
            if gate is not None:
                _await_gate(connection, gate, last_try)
            connection.set_synced(is_synced())
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() > last_try:
                    raise
                if not connection.waits_for_lock:
                    raise LockTaken from error
            time.sleep(LOCK_POLL_S)
    except BaseException:
        if gate is not None:
            gate.leave()
        raise


def _await_gate(connection: StoreConnection, gate: WriteGate, last_try: float) -> None:
    """Returns when it is worth while to ask SQLite for its lock. Raises LockTaken."""
    end = min(last_try, time.monotonic() + GATE_PATIENCE_S)
    while not gate.try_enter():
        if not connection.waits_for_lock:
            raise LockTaken
        if time.monotonic() > end:
            return
        time.sleep(LOCK_POLL_S)


def _gate_of(connection: sqlite3.Connection) -> WriteGate | None:
    """None for a database in memory."""
    return connection.gate if isinstance(connection, StoreConnection) else None


@contextlib.contextmanager
def reading(connection: sqlite3.Connection) -> Iterator[None]:
    """Every statement inside sees the same moment, whatever others commit meanwhile."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def empty_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Deleted bytes are still in it. Best effort: the session is gone, and any later checkpoint does the same."""
    with contextlib.suppress(sqlite3.Error):
        _be_careful(connection)  # it waits for readers
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _be_careful(connection: sqlite3.Connection) -> None:
    """For statements outside of a transaction: they wait for locks, and for the disk."""
    if isinstance(connection, StoreConnection):
        connection.set_patient(True)
        connection.set_synced(True)


def is_full(error: sqlite3.Error) -> bool:
    """Whether there was no room on the disk, for the database or for the index of its write-ahead log."""
    return _code(error) & 0xFF == sqlite3.SQLITE_FULL or _code(error) == sqlite3.SQLITE_IOERR_SHMSIZE


def _code(error: sqlite3.Error) -> int:
    """SQLite's extended result code."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR))


def _translate(error: sqlite3.Error, path: Path) -> NsmError:
    """Clients read these: the path, and what SQLite said, are notes for the operator."""
    translated = _by_code(error)
    is_index = _code(error) == sqlite3.SQLITE_IOERR_SHMSIZE  # SQLite says only "disk I/O error"
    translated.add_note(f"{path}: {'no room on its disk' if is_index else error}")
    return translated


def _by_code(error: sqlite3.Error) -> NsmError:
    """By SQLite's primary result code, the low byte of the extended one."""
    code = _code(error) & 0xFF
    if is_full(error):
        return StorageFull(FULL)
    if is_busy(error):
        return StoreUnavailable("the session store is locked by another process")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith(NO_TABLE):
        return StoreDamaged(DAMAGED)
    return StoreUnavailable("the session store failed")
