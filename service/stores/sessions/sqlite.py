"""Sessions in SQLite: nothing to install, and acknowledged writes survive `kill -9` and a power cut.

Processes may share the file; leases and compare-and-set hold between them.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nsm_core.errors import NotFound
from service.stores.sessions.base import (
    UNSET,
    Commit,
    KnownVersion,
    LateSnapshot,
    Lease,
    LeasedSession,
    LogMark,
    NewSession,
    Rewind,
    SessionHead,
    SessionPage,
    Shedding,
    StoredSession,
    StoreRoom,
    TenantUsage,
    Unset,
)
from service.stores.sessions.codec import checked, decode_cursor, encode_cursor, expiry, new_head, require_sound, sound
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import NO_RETENTION, RetainedSnapshot, Retention
from service.stores.sessions.sqlite_statements import (
    EXISTS,
    HEAD_COLUMNS,
    ONE,
    append_log,
    append_new,
    apply_retention,
    cut_behind,
    cut_log,
    cut_retained,
    delete_retained,
    drop_snapshots,
    find_idle,
    free,
    get_head,
    get_log,
    get_marks,
    get_retained,
    get_row,
    get_snapshot,
    get_tail,
    has_version,
    head_of,
    insert_head,
    list_idle,
    missing,
    move_head,
    note_snapshot,
    remember_expired,
    renewed,
    replace_snapshot,
    require_log,
    require_log_end,
    take,
    writable_row,
)
from service.stores.sessions.sqlite_turns import (
    SqliteTurns,
    drop_results,
    end_running,
    find_or_begin,
    remove_expired_turns,
)
from service.stores.sessions.transitions import SnapshotMark
from service.stores.sessions.turn_records import TurnStart
from service.stores.sqlite.connection import empty_write_ahead_log, reading, transaction, unsynced_transaction
from service.stores.sqlite.database import Database, FileDatabase, MemoryDatabase


class SqliteSessionStore:
    """The embedded SessionStore.

    `path`: None for sessions in memory that end with `close`. `max_bytes` bounds the file, beyond it StorageFull is
    raised (None: the disk decides); `busy_timeout_s`: how long to wait for a lock that another process holds. The lease
    of a process that has ended may be taken at once.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int | None = None,
        busy_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.snapshot_writes = 2.1  # log and file with their pages' own bytes: `stop` of benchmarks.turn_commit
        self.max_uncounted_request = 4096  # see the trigger `usage_of_request`
        self._replace_snapshot = functools.partial(replace_snapshot, is_in_memory=path is None)
        self.database: Database = MemoryDatabase()
        if path is not None:
            self.database = FileDatabase(path, max_bytes=max_bytes, busy_timeout_s=busy_timeout_s)
        turns = SqliteTurns(self.database, clock=clock)
        self.begin_turn, self.append_turn, self.end_turn = turns.begin_turn, turns.append_turn, turns.end_turn
        self.forget_turn, self.get_turn, self.cancel_turn = turns.forget_turn, turns.get_turn, turns.cancel_turn

    async def open(self) -> None:
        await self.database.open()

    async def check(self) -> None:
        """Raises what `open` would raise for a file that cannot be used; nothing is open afterwards."""
        await self.database.check()

    async def close(self) -> None:
        await self.database.close()

    async def create(self, new: NewSession) -> SessionHead:
        head = new_head(new, self._clock())

        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                insert_head(connection, head)
                self._replace_snapshot(connection, head, version=head.snapshot_version, snapshot=new.snapshot)
                append_log(connection, head, new.log_ids, new.marks)
                return head

        is_small = new.snapshot is None and not new.log_ids
        return await (self.database.write_new_short(work) if is_small else self.database.write_new(work))

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

        return await self.database.write(work)

    async def get(self, key: SessionKey) -> SessionHead:
        return await self.database.read(lambda connection: get_head(connection, key, self._clock()))

    async def load(self, key: SessionKey) -> StoredSession:
        def work(connection: sqlite3.Connection) -> StoredSession:
            with reading(connection):
                head = get_head(connection, key, self._clock())
                tail = get_tail(connection, head)
                raw = get_snapshot(connection, key, head.snapshot_version)
            return require_sound(head, raw, tail)

        return await self.database.read(work)

    async def acquire(
        self,
        key: SessionKey,
        *,
        holder: str,
        lease_s: float,
        known: KnownVersion | None = None,
        start: TurnStart | None = None,
        max_records: int = 1,
    ) -> LeasedSession:
        processes = self.database.processes

        def work(connection: sqlite3.Connection) -> LeasedSession:
            with unsynced_transaction(connection):  # a power cut ends its turn as well
                now = self._clock()
                row = get_row(connection, key, now)
                head = row.head
                is_known = known == (head.created_at, head.version)
                tail = None
                if is_known:
                    require_log_end(connection, row)
                else:
                    require_log(connection, head)
                    tail = get_tail(connection, head)
                lease = take(connection, row, holder=holder, now=now, lease_s=lease_s, processes=processes)
                retained = get_retained(connection, head)
                record = None
                if start is not None:
                    record = find_or_begin(
                        connection, row, start, max_records=max_records, ends_abandoned=False, now=now
                    )
                raw = None if is_known else get_snapshot(connection, key, head.snapshot_version)
            stored = StoredSession(head=head, snapshot=None) if tail is None else checked(head, raw, tail)
            return LeasedSession(lease=lease, stored=stored, retained=retained, is_known=is_known, record=record)

        return await self.database.write_short(work, is_synced=False)

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        def work(connection: sqlite3.Connection) -> Lease:
            with transaction(connection):
                return renewed(connection, lease, now=self._clock(), lease_s=lease_s)

        return await self.database.write_short(work, is_synced=True)

    async def release(self, lease: Lease) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                free(connection, lease)

        await self.database.write_short(work, is_synced=True)

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        def work(connection: sqlite3.Connection, retention: Retention = commit.retention) -> SessionHead:
            with transaction(connection):
                now = self._clock()
                row = writable_row(connection, lease, commit.expected_version, now)
                head = row.head
                end_running(connection, row, commit.turn, now)
                if commit.after is not None:
                    head = cut_behind(connection, head, commit.after)
                append_new(connection, head, commit)
                if commit.snapshot is not None:
                    head = self._store_snapshot(connection, head, commit.newest_mark, commit.snapshot, retention)
                num_log_tokens = head.num_log_tokens + len(commit.new_ids)
                return move_head(connection, head, commit, num_log_tokens=num_log_tokens, now=now)

        def without_another_snapshot(connection: sqlite3.Connection) -> SessionHead:
            head = get_head(connection, lease.key, self._clock())
            keep = tuple(version for version in commit.retention.keep if version != head.snapshot_version)
            return work(connection, Retention(keep=keep))

        if commit.snapshot is None:
            return await self.database.write_short(work, is_synced=True)
        return await self.database.write(work, when_full=without_another_snapshot)

    async def put_snapshot(self, key: SessionKey, late: LateSnapshot) -> SessionHead | None:
        def work(connection: sqlite3.Connection) -> SessionHead | None:
            with unsynced_transaction(connection):
                try:
                    head = get_head(connection, key, self._clock())
                except NotFound:
                    return None
                is_newer = head.created_at == late.created_at and head.snapshot_version < late.version
                if not is_newer or not has_version(connection, head, version=late.version, position=late.position):
                    return None
                mark = SnapshotMark(late.version, late.position)
                return self._store_snapshot(connection, head, mark, late.snapshot, late.retention)

        return await self.database.write(work)

    def _store_snapshot(
        self, connection: sqlite3.Connection, head: SessionHead, mark: SnapshotMark, raw: bytes, retention: Retention
    ) -> SessionHead:
        """The newest snapshot from now on. Inside a transaction."""
        apply_retention(connection, head, retention)
        self._replace_snapshot(connection, head, version=mark.version, snapshot=raw)
        return note_snapshot(connection, head, version=mark.version, position=mark.position, num_bytes=len(raw))

    async def shed_snapshots(self, shedding: Shedding) -> int:
        until = self._clock() - shedding.unused_for_s
        is_newest_due = shedding.of_model is not None

        def shed(connection: sqlite3.Connection, key: SessionKey) -> bool:
            with unsynced_transaction(connection):
                head = find_idle(connection, key, until=until, now=self._clock())
                if head is None:
                    return False
                apply_retention(connection, head, NO_RETENTION)
                version = 0 if is_newest_due else head.snapshot_version
                drop_snapshots(connection, head, but=version)
                if is_newest_due:
                    note_snapshot(connection, head, version=0, position=0, num_bytes=0)
                return True

        keys = await self.database.read(lambda connection: list_idle(connection, shedding, until=until))
        return sum([await self.database.write(functools.partial(shed, key=key)) for key in keys])

    async def rewind(self, lease: Lease, rewind: Rewind) -> SessionHead:
        def work(connection: sqlite3.Connection) -> SessionHead:
            with transaction(connection):
                now = self._clock()
                row = writable_row(connection, lease, rewind.expected_version, now)
                head = row.head
                end_running(connection, row, None, now)
                last_version = cut_log(connection, head, rewind)
                drop_results(connection, head, last_version)
                cut_retained(connection, head, rewind)
                self._replace_snapshot(connection, head, version=rewind.version, snapshot=rewind.snapshot)
                mark = SnapshotMark(0, 0) if rewind.snapshot is None else SnapshotMark(rewind.version, rewind.position)
                head = note_snapshot(
                    connection, head, version=mark.version, position=mark.position, num_bytes=rewind.num_bytes
                )
                rewound = move_head(connection, head, rewind, num_log_tokens=rewind.num_log_tokens, now=now)
            empty_write_ahead_log(connection)  # the cut tokens are deleted
            return rewound

        return await self.database.write(work)

    async def read_log(self, key: SessionKey, *, stop: int | None = None) -> tuple[int, ...]:
        def work(connection: sqlite3.Connection) -> tuple[int, ...]:
            with reading(connection):
                return get_log(connection, get_head(connection, key, self._clock()))[:stop]

        return await self.database.read(work)

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        def work(connection: sqlite3.Connection) -> tuple[LogMark, ...]:
            with reading(connection):
                return get_marks(connection, get_head(connection, key, self._clock()))

        return await self.database.read(work)

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

        return await self.database.read(work)

    async def list_tenants(self) -> tuple[str, ...]:
        def work(connection: sqlite3.Connection) -> tuple[str, ...]:
            rows = connection.execute("SELECT tenant FROM usage WHERE num_sessions > 0 ORDER BY tenant").fetchall()
            return tuple(tenant for (tenant,) in rows)

        return await self.database.read(work)

    async def usage(self, *, tenant: str) -> TenantUsage:
        def work(connection: sqlite3.Connection) -> TenantUsage:
            row = connection.execute("SELECT num_sessions, num_bytes FROM usage WHERE tenant = ?", (tenant,)).fetchone()
            num_sessions, num_bytes = row or (0, 0)
            return TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)

        return await self.database.read(work)

    async def list_retained(self, key: SessionKey) -> tuple[RetainedSnapshot, ...]:
        def work(connection: sqlite3.Connection) -> tuple[RetainedSnapshot, ...]:
            with reading(connection):
                return get_retained(connection, get_head(connection, key, self._clock()))

        return await self.database.read(work)

    async def load_retained(self, key: SessionKey, *, version: int) -> bytes | None:
        def work(connection: sqlite3.Connection) -> bytes | None:
            with reading(connection):
                head = get_head(connection, key, self._clock())
                known = {head.snapshot_version, *(one.version for one in get_retained(connection, head))}
                raw = get_snapshot(connection, key, version) if version in known else None
            return sound(raw)

        return await self.database.read(work)

    async def delete(self, key: SessionKey) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                statement = f"DELETE FROM sessions WHERE {ONE} AND {EXISTS}"
                if connection.execute(statement, (*key, self._clock())).rowcount == 0:
                    raise missing(connection, key)
            empty_write_ahead_log(connection)

        def in_parts(connection: sqlite3.Connection) -> None:
            delete_retained(connection, key)
            work(connection)

        await self.database.write(work, when_full=in_parts)

    async def room(self) -> StoreRoom | None:
        return await self.database.room()

    async def remove_expired(self) -> int:
        def work(connection: sqlite3.Connection) -> int:
            now = self._clock()
            with transaction(connection):
                remove_expired_turns(connection, now)
                remember_expired(connection, now)
                statement = f"DELETE FROM sessions WHERE expires_at <= ? AND NOT {EXISTS}"
                num_removed = connection.execute(statement, (now, now)).rowcount
            if num_removed:
                empty_write_ahead_log(connection)
            return num_removed

        def one_by_one(connection: sqlite3.Connection) -> int:
            query = f"SELECT tenant, session_id FROM sessions WHERE expires_at <= ? AND NOT {EXISTS}"
            now = self._clock()
            keys = connection.execute(query, (now, now)).fetchall()
            with transaction(connection):
                remember_expired(connection, now)
            for key in itertools.starmap(SessionKey, keys):
                delete_retained(connection, key)
                with transaction(connection):
                    connection.execute(f"DELETE FROM sessions WHERE {ONE}", key)
                empty_write_ahead_log(connection)
            return len(keys)

        return await self.database.write(work, when_full=one_by_one)

    async def check_writable(self) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                pass  # it raises the stamp

        await self.database.write(work)
        self.database.require_sound()  # that write reads few pages
