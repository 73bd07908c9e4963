"""The database under the SQLite stores: in a file, or in memory for tests and for servers that need not remember.

Work is a function of a connection. One thread owns the connection that writes, and for a file another the one that
reads: a load does not wait for another session's fsync, and the event loop waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nsm_core.errors import NsmError, StorageFull, StoreDamaged, StoreUnavailable
from service.stores.sessions.base import StoreRoom
from service.stores.sqlite.ballast import Ballast
from service.stores.sqlite.connection import DAMAGED, ConnectionThread, Result, Work, file_thread, memory_thread
from service.stores.sqlite.file_watch import FileWatch
from service.stores.sqlite.group_commit import GroupCommit
from service.stores.sqlite.process_lock import Processes, ProcessLock, SoleProcess
from service.stores.sqlite.schema import create_file, migrate, page_bytes

logger = logging.getLogger("nsm.store")

Part = TypeVar("Part")


class Database(Protocol):
    """Raises StoreUnavailable and StorageFull; `processes` tells which of those that share it have ended."""

    num_lost_writes: int

    @property
    def processes(self) -> Processes: ...

    async def open(self) -> None: ...

    async def check(self) -> None:
        """Raises what `open` would raise for a file that cannot be used; nothing is open afterwards."""
        ...

    async def close(self) -> None: ...

    def require_sound(self) -> None:
        """Raises StoreDamaged if a call since `open` has met damage in the file."""
        ...

    async def room(self) -> StoreRoom | None: ...

    async def read(self, work: Work[Result]) -> Result: ...

    async def write(self, work: Work[Result], *, when_full: Work[Result] | None = None) -> Result:
        """`work`, which continues or deletes what exists; `when_full` runs in its place on a full disk."""
        ...

    async def write_short(self, work: Work[Result], *, is_synced: bool) -> Result:
        """`work`, one small transaction that continues what exists, maybe within one of several; it may run twice.

        `is_synced`: it is a `transaction`, not an `unsynced_transaction`.
        """
        ...

    async def write_new(self, work: Work[Result]) -> Result:
        """`work`, which adds a session; on a full disk it is refused before one that exists."""
        ...

    async def write_new_short(self, work: Work[Result]) -> Result:
        """The same of one small `transaction`, maybe within one of several; it may run twice."""
        ...


class MemoryDatabase:
    """One connection. It needs no `open`; everything in it ends with `close`."""

    num_lost_writes = 0

    def __init__(self) -> None:
        self._thread: ConnectionThread | None = memory_thread()
        self.processes = SoleProcess()

    async def open(self) -> None:
        if self._thread is None:
            self._thread = memory_thread()

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close()

    def require_sound(self) -> None:
        pass

    async def room(self) -> StoreRoom | None:
        return None

    async def read(self, work: Work[Result]) -> Result:
        return await _opened(self._thread).run(work)

    async def write(self, work: Work[Result], *, when_full: Work[Result] | None = None) -> Result:
        return await _opened(self._thread).run(work)

    async def write_short(self, work: Work[Result], *, is_synced: bool) -> Result:
        return await _opened(self._thread).run(work)

    async def write_new(self, work: Work[Result]) -> Result:
        return await _opened(self._thread).run(work)

    async def write_new_short(self, work: Work[Result]) -> Result:
        return await _opened(self._thread).run(work)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    writer: ConnectionThread
    reader: ConnectionThread
    process_lock: ProcessLock
    watch: FileWatch
    group: GroupCommit


class FileDatabase:
    """`max_bytes` bounds the file (None: the disk decides); `busy_timeout_s`: the wait for another process's lock."""

    def __init__(self, path: Path, *, max_bytes: int | None, busy_timeout_s: float) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._busy_timeout_s = busy_timeout_s
        self._ballast = Ballast(path)
        self._parts: _Parts | None = None
        self.num_lost_writes = 0

    @property
    def processes(self) -> Processes:
        return _opened(self._parts).process_lock

    async def open(self) -> None:
        with self._creating():
            await asyncio.to_thread(create_file, self._path)
            process_lock = await asyncio.to_thread(ProcessLock, self._path)
        writer = file_thread("writer", self._path, busy_timeout_s=self._busy_timeout_s)
        reader = file_thread("reader", self._path, busy_timeout_s=self._busy_timeout_s)
        watch = FileWatch(self._path)
        self._parts = parts = _Parts(writer, reader, process_lock, watch, self._group_commit(writer, watch))
        try:
            await self._prepare(parts)
        except NsmError:
            await self.close()
            raise

    async def check(self) -> None:
        with self._creating():
            await asyncio.to_thread(create_file, self._path)
        thread = file_thread("check", self._path, busy_timeout_s=self._busy_timeout_s)
        try:
            await thread.run(lambda connection: migrate(connection, self._path))
        except StorageFull:
            if not self._ballast.has_room():  # else `open` releases it
                raise
        finally:
            await thread.close()

    def _group_commit(self, writer: ConnectionThread, watch: FileWatch) -> GroupCommit:
        def begin(connection: sqlite3.Connection) -> bool:
            watch.check_before_write(connection)
            return self._ballast.make()

        def alone(connection: sqlite3.Connection, work: Work[Any]) -> Any:
            return _acknowledged(watch, connection, self._ballast.guard(work))

        return GroupCommit(writer, alone=alone, begin=begin, acknowledge=watch.acknowledge)

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"cannot {_failed_to_create(self._path, error)}") from error

    async def _prepare(self, parts: _Parts) -> None:
        def prepare(connection: sqlite3.Connection) -> None:
            migrate(connection, self._path)
            if self._max_bytes is not None:
                connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // page_bytes(connection))}")
            parts.watch.begin(connection)

        try:
            await parts.writer.run(prepare)
        except StorageFull:
            logger.warning("%s: its disk is full; the store opens in the room of its ballast", self._path)
            self._ballast.release()
            await parts.writer.run(prepare)
        await parts.reader.run(lambda connection: None)  # connects, while the path has the file that was prepared
        await asyncio.to_thread(self._ballast.make)
        self.num_lost_writes = parts.watch.num_lost_writes

    async def close(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            # The last connection to close puts the write-ahead log into the database, which may grow
            with self._ballast.released() if parts.process_lock.is_alone() else contextlib.nullcontext():
                await parts.writer.close()
                await parts.reader.close()
            parts.watch.end()
            parts.process_lock.end()

    def require_sound(self) -> None:
        parts = _opened(self._parts)
        if parts.writer.has_met_damage or parts.reader.has_met_damage:
            error = StoreDamaged(DAMAGED)
            error.add_note(f"{self._path}: met by an earlier call")
            raise error

    async def room(self) -> StoreRoom | None:
        """Of the disk; of `max_bytes` where these are less."""
        try:
            usage, used = await asyncio.to_thread(
                lambda: (shutil.disk_usage(self._path.parent), self._path.stat().st_size)
            )
        except OSError as error:
            raise StoreUnavailable(f"cannot read the free space of the disk of {self._path}: {error}") from error
        if self._max_bytes is None:
            return StoreRoom(kind="sqlite", num_free=usage.free, num_bytes=usage.total)
        left = max(0, self._max_bytes - used)
        return StoreRoom(kind="sqlite", num_free=min(usage.free, left), num_bytes=min(usage.total, self._max_bytes))

    async def read(self, work: Work[Result]) -> Result:
        parts = _opened(self._parts)

        def checked(connection: sqlite3.Connection) -> Result:
            parts.watch.check()
            return work(connection)

        return await parts.reader.run(checked)

    async def write(self, work: Work[Result], *, when_full: Work[Result] | None = None) -> Result:
        return await self._write(self._ballast.guard(work, when_full=when_full))

    async def write_short(self, work: Work[Result], *, is_synced: bool) -> Result:
        return await _opened(self._parts).group.run(work, is_synced=is_synced)

    async def write_new(self, work: Work[Result]) -> Result:
        return await self._write(self._ballast.guard_new(work))

    async def write_new_short(self, work: Work[Result]) -> Result:
        parts = _opened(self._parts)

        def alone(connection: sqlite3.Connection, work: Work[Any]) -> Any:
            return _acknowledged(parts.watch, connection, self._ballast.guard_new(work))

        return await parts.group.run(work, is_synced=True, alone=alone)

    async def _write(self, work: Work[Result]) -> Result:
        parts = _opened(self._parts)
        return await parts.writer.run(lambda connection: _acknowledged(parts.watch, connection, work))


def _failed_to_create(path: Path, error: OSError) -> str:
    """What could not be done, and why."""
    if not path.parent.exists():
        return f"create the directory {path.parent} of the session store: {error.strerror}"
    return f"create the session store {path}: {error.strerror}"


def _acknowledged(watch: FileWatch, connection: sqlite3.Connection, work: Work[Result]) -> Result:
    """`work` on files that were there before and are there after."""
    watch.check_before_write(connection)
    result = work(connection)
    watch.acknowledge(connection)
    return result


def _opened(part: Part | None) -> Part:
    if part is None:
        raise StoreUnavailable("the session store is not open")
    return part
