"""Sessions in one SQLite file: nothing to install, and what was acknowledged survives `kill -9` and a power cut.

One thread owns the connection that writes, another the one that reads: a load does not wait for another session's
fsync, and the event loop waits for neither. Processes may share the file; leases and compare-and-set hold between them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nsm_core.errors import NsmError, StorageFull, StoreUnavailable
from service.stores.sessions.base import (
    UNSET,
    Commit,
    Lease,
    LeasedSession,
    LogMark,
    NewSession,
    Rewind,
    SessionHead,
    SessionPage,
    StoredSession,
    StoreRoom,
    TenantUsage,
    Unset,
)
from service.stores.sessions.codec import checked, decode_cursor, encode_cursor, expiry, new_head, require_sound, sound
from service.stores.sessions.errors import not_found
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot
from service.stores.sessions.sqlite_statements import (
    EXISTS,
    HEAD_COLUMNS,
    ONE,
    append_chunk,
    append_log,
    apply_retention,
    cut_log,
    cut_retained,
    delete_most_retained,
    free,
    get_head,
    get_log,
    get_marks,
    get_retained,
    get_snapshot,
    head_of,
    insert_head,
    move_head,
    renewed,
    replace_snapshot,
    take,
    writable_head,
)
from service.stores.sessions.sqlite_turns import SqliteTurns, drop_results, end_running, remove_expired_turns
from service.stores.sqlite.connection import (
    ConnectionThread,
    Result,
    empty_write_ahead_log,
    reading,
    store_thread,
    transaction,
)
from service.stores.sqlite.probe import SqliteProbe
from service.stores.sqlite.process_lock import ProcessLock
from service.stores.sqlite.reserve import Reserve
from service.stores.sqlite.schema import PAGE_BYTES, create_file, migrate


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    writer: ConnectionThread
    reader: ConnectionThread
    process_lock: ProcessLock


class SqliteSessionStore:
    """The embedded SessionStore.

    `max_bytes` bounds the file, beyond it StorageFull is raised (None: the disk decides); `busy_timeout_s`: how long to
    wait for a lock that another process holds. The lease of a process that has ended may be taken at once.
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
        self.reserve = Reserve(path)
        self._opened: _Opened | None = None
        turns = SqliteTurns(
            write=self.write, read=self.read, process_lock=lambda: self._open_parts().process_lock, clock=clock
        )
        self.begin_turn, self.append_turn, self.end_turn = turns.begin_turn, turns.append_turn, turns.end_turn
        self.forget_turn, self.get_turn, self.cancel_turn = turns.forget_turn, turns.get_turn, turns.cancel_turn
        probe = SqliteProbe(write=self.write, hold=self.reserve.hold, clock=clock)
        self.check_writable, self._write_state = probe.check_writable, probe.write_state

    async def open(self) -> None:
        try:
            await asyncio.to_thread(create_file, self._path)
            process_lock = await asyncio.to_thread(ProcessLock, self._path)
        except OSError as error:
            raise StoreUnavailable(f"cannot create the session store {self._path}: {error.strerror}") from error
        timeout = self._busy_timeout_s
        writer = store_thread("writer", self._path, busy_timeout_s=timeout)
        reader = store_thread("reader", self._path, busy_timeout_s=timeout)
        self._opened = _Opened(writer, reader, process_lock)
        try:
            await self._prepare_file(writer)
        except NsmError:
            await self.close()
            raise

    async def _prepare_file(self, writer: ConnectionThread) -> None:
        try:
            await writer.run(self._prepare)
        except StorageFull:
            self.reserve.give_up()
            await writer.run(self._prepare)
        await asyncio.to_thread(self.reserve.fill)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        migrate(connection, self._path)
        if self._max_bytes is not None:
            connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // PAGE_BYTES)}")
        (largest,) = connection.execute("SELECT coalesce(max(snapshot_bytes), 0) FROM sessions").fetchone()
        self.reserve.hold(largest)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            if opened.process_lock.is_alone():
                self.reserve.remove()  # before the last connection puts the write-ahead log into the database
            await opened.writer.close()
            await opened.reader.close()
            opened.process_lock.end()

    async def create(self, new: NewSession) -> SessionHead:
        head = new_head(new, self._clock())

        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                insert_head(connection, head)
                replace_snapshot(connection, head, version=new.version, snapshot=new.snapshot)
                append_log(connection, head, new.log_ids, new.marks)
                return head

        return await self._write_state(work, len(new.snapshot or b""))

    async def update(
        self,
        key: SessionKey,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | Unset | None = UNSET,
    ) -> SessionHead:
        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                now = self._clock()
                head = get_head(connection, key, now)
                new_ttl_s = head.ttl_s if isinstance(ttl_s, Unset) else ttl_s
                new_metadata = json.dumps(dict(head.metadata if metadata is None else metadata))
                connection.execute(
                    f"UPDATE sessions SET metadata = ?, ttl_s = ?, expires_at = ?, updated_at = ? WHERE {ONE}",
                    (new_metadata, new_ttl_s, expiry(now, new_ttl_s), now, *key),
                )
                return get_head(connection, key, now)

        return await self.write(work)

    async def get(self, key: SessionKey) -> SessionHead:
        return await self.read(lambda connection: get_head(connection, key, self._clock()))

    async def load(self, key: SessionKey) -> StoredSession:
        def work(connection: sqlite3.Connection) -> StoredSession:
            with reading(connection):
                head = get_head(connection, key, self._clock())
                raw = get_snapshot(connection, head)
            return require_sound(head, raw)

        return await self.read(work)

    async def acquire(self, key: SessionKey, *, holder: str, lease_s: float) -> LeasedSession:
        process_lock = self._open_parts().process_lock

        def work(connection: sqlite3.Connection) -> LeasedSession:
            with transaction(connection):
                now = self._clock()
                head = get_head(connection, key, now)
                lease = take(connection, head, holder=holder, now=now, lease_s=lease_s, process_lock=process_lock)
                raw, retained = get_snapshot(connection, head), get_retained(connection, head)
            return LeasedSession(lease=lease, stored=checked(head, raw), retained=retained)

        return await self.write(work)

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        def work(connection: sqlite3.Connection) -> Lease:
            with transaction(connection):
                return renewed(connection, lease, now=self._clock(), lease_s=lease_s)

        return await self.write(work)

    async def release(self, lease: Lease) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                free(connection, lease)

        await self.write(work)

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                now = self._clock()
                head = writable_head(connection, lease, commit.expected_version, now)
                end_running(connection, head, commit.turn, now)
                append_chunk(connection, head, commit.new_ids, commit)
                apply_retention(connection, head, commit.retention)
                replace_snapshot(connection, head, version=commit.version, snapshot=commit.snapshot)
                num_log_tokens = head.num_log_tokens + len(commit.new_ids)
                return move_head(connection, head, commit, num_log_tokens=num_log_tokens, now=now)

        return await self._write_state(work, len(commit.snapshot) + len(commit.retention.snapshot))

    async def rewind(self, lease: Lease, rewind: Rewind) -> SessionHead:
        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                now = self._clock()
                head = writable_head(connection, lease, rewind.expected_version, now)
                end_running(connection, head, None, now)
                last_version = cut_log(connection, head, rewind)
                drop_results(connection, head, last_version)
                cut_retained(connection, head, rewind)
                replace_snapshot(connection, head, version=rewind.version, snapshot=rewind.snapshot)
                moved = move_head(connection, head, rewind, num_log_tokens=rewind.num_log_tokens, now=now)
            empty_write_ahead_log(connection)  # what was cut off is deleted
            return moved

        return await self._write_state(work, len(rewind.snapshot or b""))

    async def read_log(self, key: SessionKey, *, stop: int | None = None) -> tuple[int, ...]:
        def work(connection: sqlite3.Connection) -> tuple[int, ...]:
            with reading(connection):
                return get_log(connection, get_head(connection, key, self._clock()))[:stop]

        return await self.read(work)

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        def work(connection: sqlite3.Connection) -> tuple[LogMark, ...]:
            with reading(connection):
                return get_marks(connection, get_head(connection, key, self._clock()))

        return await self.read(work)

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        created_before, id_before = (float("inf"), "") if cursor is None else decode_cursor(cursor)

        def work(connection: sqlite3.Connection) -> SessionPage:
            rows = connection.execute(
                f"SELECT {HEAD_COLUMNS} FROM sessions WHERE tenant = ? AND (created_at, session_id) < (?, ?) "
                f"AND {EXISTS} ORDER BY created_at DESC, session_id DESC LIMIT ?",
                (tenant, created_before, id_before, self._clock(), limit + 1),
            ).fetchall()
            heads = tuple(head_of(row) for row in rows[:limit])
            return SessionPage(heads=heads, next_cursor=encode_cursor(heads[-1]) if len(rows) > limit else None)

        return await self.read(work)

    async def list_tenants(self) -> tuple[str, ...]:
        def work(connection: sqlite3.Connection) -> tuple[str, ...]:
            rows = connection.execute("SELECT tenant FROM usage WHERE num_sessions > 0 ORDER BY tenant").fetchall()
            return tuple(tenant for (tenant,) in rows)

        return await self.read(work)

    async def usage(self, *, tenant: str) -> TenantUsage:
        def work(connection: sqlite3.Connection) -> TenantUsage:
            row = connection.execute("SELECT num_sessions, num_bytes FROM usage WHERE tenant = ?", (tenant,)).fetchone()
            num_sessions, num_bytes = row or (0, 0)
            return TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)

        return await self.read(work)

    async def list_retained(self, key: SessionKey) -> tuple[RetainedSnapshot, ...]:
        def work(connection: sqlite3.Connection) -> tuple[RetainedSnapshot, ...]:
            with reading(connection):
                return get_retained(connection, get_head(connection, key, self._clock()))

        return await self.read(work)

    async def load_retained(self, key: SessionKey, *, version: int) -> bytes | None:
        def work(connection: sqlite3.Connection) -> bytes | None:
            with reading(connection):
                get_head(connection, key, self._clock())
                query = f"SELECT snapshot FROM retained_snapshots WHERE {ONE} AND version = ?"
                row = connection.execute(query, (*key, version)).fetchone()
            return sound(None if row is None else bytes(row[0]))

        return await self.read(work)

    async def delete(self, key: SessionKey) -> None:
        def work(connection: sqlite3.Connection) -> None:
            delete_most_retained(connection, key)
            with transaction(connection):
                statement = f"DELETE FROM sessions WHERE {ONE} AND {EXISTS}"
                if connection.execute(statement, (*key, self._clock())).rowcount == 0:
                    raise not_found(key.session_id)
            empty_write_ahead_log(connection)

        await self.write(self.reserve.lent_to(work))

    async def room(self) -> StoreRoom | None:
        """Of the disk; of `max_bytes` where these are less."""
        try:
            usage, used = await asyncio.to_thread(lambda: (shutil.disk_usage(self._path.parent), _size_of(self._path)))
        except OSError as error:
            raise StoreUnavailable(f"the disk of {self._path} cannot be asked for its room: {error}") from error
        if self._max_bytes is None:
            return StoreRoom(kind="sqlite", num_free=usage.free, num_bytes=usage.total)
        left = max(0, self._max_bytes - used)
        return StoreRoom(kind="sqlite", num_free=min(usage.free, left), num_bytes=min(usage.total, self._max_bytes))

    async def remove_expired(self) -> int:
        def work(connection: sqlite3.Connection) -> int:
            now = self._clock()
            with transaction(connection):
                remove_expired_turns(connection, now)
                statement = f"DELETE FROM sessions WHERE expires_at <= ? AND NOT {EXISTS}"
                num_removed = connection.execute(statement, (now, now)).rowcount
            if num_removed:
                empty_write_ahead_log(connection)
            return num_removed

        return await self.write(self.reserve.lent_to(work))

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._open_parts().writer.run(self.reserve.behind(work))

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._open_parts().reader.run(work)

    def _open_parts(self) -> _Opened:
        if self._opened is None:
            raise StoreUnavailable("the session store is not open")
        return self._opened


def _size_of(path: Path) -> int:
    """Bytes of the database file, without its write-ahead log."""
    return path.stat().st_size
