"""Sessions in one SQLite file: nothing to install, and what was acknowledged survives `kill -9` and a power cut.

One thread owns the connection that writes, another the one that reads: a load does not wait for another session's
fsync, and the event loop waits for neither. Processes may share the file; compare-and-set holds between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from nsm_core.errors import NsmError, SnapshotCorrupt, StorageFull, StoreUnavailable
from nsm_core.state.snapshot import verify
from service.sessions.base import SessionHead, SessionPage, StoredSession
from service.sessions.records import (
    already_exists,
    decode_cursor,
    decode_ids,
    encode_cursor,
    encode_ids,
    not_found,
    require_same_head,
)
from service.sessions.sqlite_schema import PAGE_BYTES, connect, create_file, migrate

Result = TypeVar("Result")

_HEAD = (
    "sessions.tenant, sessions.session_id, sessions.version, position, created_at, updated_at, model_fingerprint, "
    "metadata, num_log_tokens, snapshot_bytes"
)
_ONE = "tenant = ? AND session_id = ?"


class _Thread:
    """A connection and the one thread that uses it."""

    def __init__(self, name: str, path: Path, *, busy_timeout_s: float) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"nsm-store-{name}")
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """`work` in the thread, to its end even when the caller is cancelled; SQLite's errors come out as ours."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._guarded, work)

    def _guarded(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            if self._connection is None:
                self._connection = connect(self._path, busy_timeout_s=self._busy_timeout_s)
            return work(self._connection)
        except sqlite3.Error as error:
            raise _translate(error, self._path) from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        self._executor.shutdown()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class SqliteSessionStore:
    """The embedded SessionStore.

    `max_bytes` bounds the file, beyond it StorageFull is raised (None: the disk decides); `busy_timeout_s`: how long to
    wait for a lock that another process holds.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int | None = None,
        busy_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._busy_timeout_s = busy_timeout_s
        self._clock = clock
        self._threads: tuple[_Thread, _Thread] | None = None

    async def open(self) -> None:
        try:
            await asyncio.to_thread(create_file, self._path)
        except OSError as error:
            raise StoreUnavailable(f"cannot create the session store {self._path}: {error.strerror}") from error
        timeout = self._busy_timeout_s
        writer = _Thread("writer", self._path, busy_timeout_s=timeout)
        self._threads = (writer, _Thread("reader", self._path, busy_timeout_s=timeout))
        try:
            await self._write(self._prepare)
        except NsmError:
            await self.close()
            raise

    def _prepare(self, connection: sqlite3.Connection) -> None:
        migrate(connection, self._path)
        if self._max_bytes is not None:
            connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // PAGE_BYTES)}")

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        for thread in threads or ():
            await thread.close()

    async def create(
        self, *, tenant: str, session_id: str, model_fingerprint: str, metadata: Mapping[str, str]
    ) -> SessionHead:
        def work(connection: sqlite3.Connection) -> SessionHead:
            with _transaction(connection):
                if _find(connection, tenant, session_id) is not None:
                    raise already_exists(session_id)
                now = self._clock()
                row = (tenant, session_id, 0, 0, now, now, model_fingerprint, json.dumps(dict(metadata)), 0, 0)
                connection.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
                return _head(row)

        return await self._write(work)

    async def get(self, *, tenant: str, session_id: str) -> SessionHead:
        return await self._read(lambda connection: _get(connection, tenant, session_id))

    async def load(self, *, tenant: str, session_id: str) -> StoredSession:
        def work(connection: sqlite3.Connection) -> StoredSession:
            query = f"SELECT {_HEAD}, snapshot FROM sessions LEFT JOIN snapshots USING (tenant, session_id, version)"
            row = connection.execute(f"{query} WHERE {_ONE}", (tenant, session_id)).fetchone()
            if row is None:
                raise not_found(session_id)
            head, snapshot = _head(row[:-1]), row[-1]
            if snapshot is not None:
                verify(snapshot)
            elif head.version > 0:
                raise SnapshotCorrupt(f"session {session_id!r} has no snapshot of its version {head.version}")
            return StoredSession(head=head, snapshot=snapshot)

        return await self._read(work)

    async def commit(
        self,
        *,
        tenant: str,
        session_id: str,
        created_at: float,
        expected_version: int,
        snapshot: bytes,
        position: int,
        model_fingerprint: str,
        new_ids: tuple[int, ...],
    ) -> SessionHead:
        version, one = expected_version + 1, (tenant, session_id)

        def work(connection: sqlite3.Connection) -> SessionHead:
            with _transaction(connection):
                head = _get(connection, tenant, session_id)
                require_same_head(head, created_at=created_at, expected_version=expected_version)
                # The old snapshot goes first: the new one then takes its pages, and they are written once.
                connection.execute(f"DELETE FROM snapshots WHERE {_ONE}", one)
                connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", (*one, version, snapshot))
                connection.execute("INSERT INTO log_chunks VALUES (?, ?, ?, ?)", (*one, version, encode_ids(new_ids)))
                connection.execute(
                    "UPDATE sessions SET version = ?, position = ?, updated_at = ?, model_fingerprint = ?, "
                    f"num_log_tokens = num_log_tokens + ?, snapshot_bytes = ? WHERE {_ONE}",
                    (version, position, self._clock(), model_fingerprint, len(new_ids), len(snapshot), *one),
                )
                return _get(connection, tenant, session_id)

        return await self._write(work)

    async def read_log(self, *, tenant: str, session_id: str) -> tuple[int, ...]:
        def work(connection: sqlite3.Connection) -> tuple[int, ...]:
            # One statement is one consistent read; the outer join tells a session without turns from no session.
            query = "SELECT ids, num_log_tokens FROM sessions LEFT JOIN log_chunks USING (tenant, session_id)"
            where = f"WHERE {_ONE} ORDER BY log_chunks.version"
            rows = connection.execute(f"{query} {where}", (tenant, session_id)).fetchall()
            if not rows:
                raise not_found(session_id)
            ids = decode_ids(b"".join(chunk for chunk, _ in rows if chunk is not None))
            if len(ids) != rows[0][1]:
                raise SnapshotCorrupt(f"the log of session {session_id!r} has {len(ids)} tokens of {rows[0][1]}")
            return ids

        return await self._read(work)

    async def delete(self, *, tenant: str, session_id: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                deleted = connection.execute(f"DELETE FROM sessions WHERE {_ONE}", (tenant, session_id))
                if deleted.rowcount == 0:
                    raise not_found(session_id)
            _empty_write_ahead_log(connection)

        await self._write(work)

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        created_before, id_before = (float("inf"), "") if cursor is None else decode_cursor(cursor)

        def work(connection: sqlite3.Connection) -> SessionPage:
            rows = connection.execute(
                f"SELECT {_HEAD} FROM sessions WHERE tenant = ? AND (created_at, session_id) < (?, ?) "
                "ORDER BY created_at DESC, session_id DESC LIMIT ?",
                (tenant, created_before, id_before, limit + 1),
            ).fetchall()
            heads = tuple(_head(row) for row in rows[:limit])
            return SessionPage(heads=heads, next_cursor=encode_cursor(heads[-1]) if len(rows) > limit else None)

        return await self._read(work)

    async def check_writable(self) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                connection.execute("INSERT OR REPLACE INTO probe VALUES (1, ?)", (self._clock(),))

        await self._write(work)

    async def _write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._open_threads()[0].run(work)

    async def _read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._open_threads()[1].run(work)

    def _open_threads(self) -> tuple[_Thread, _Thread]:
        if self._threads is None:
            raise StoreUnavailable("the session store is not open")
        return self._threads


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the write lock is taken at the start, so that what is read inside is still true at the end."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself after some errors, a full disk among them
            connection.execute("ROLLBACK")
        raise


def _empty_write_ahead_log(connection: sqlite3.Connection) -> None:
    """What was deleted is still in it. Best effort: the session is gone, and any later checkpoint does the same."""
    with contextlib.suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _find(connection: sqlite3.Connection, tenant: str, session_id: str) -> SessionHead | None:
    row = connection.execute(f"SELECT {_HEAD} FROM sessions WHERE {_ONE}", (tenant, session_id)).fetchone()
    return None if row is None else _head(row)


def _get(connection: sqlite3.Connection, tenant: str, session_id: str) -> SessionHead:
    head = _find(connection, tenant, session_id)
    if head is None:
        raise not_found(session_id)
    return head


def _head(row: tuple[Any, ...]) -> SessionHead:
    """A row of `_HEAD`'s columns, which are the tables' and the dataclass's in their order."""
    return SessionHead(
        tenant=row[0],
        session_id=row[1],
        version=row[2],
        position=row[3],
        created_at=row[4],
        updated_at=row[5],
        model_fingerprint=row[6],
        metadata=MappingProxyType(json.loads(row[7])),
        num_log_tokens=row[8],
        snapshot_bytes=row[9],
    )


def _translate(error: sqlite3.Error, path: Path) -> NsmError:
    """By SQLite's primary result code, the low byte of the extended one."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"the session store {path} is full")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(f"the session store {path} is locked by another process")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreUnavailable(f"the session store {path} is damaged or not a database", retry_after_s=60.0)
    return StoreUnavailable(f"the session store {path} failed: {error}")
