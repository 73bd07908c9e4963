"""Documents in the session store's SQLite database."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

from service.stores.records.base import ABSENT, Kind, OwnedRecord, Record
from service.stores.records.conflict import conflict
from service.stores.sessions.codec import decoding
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.connection import empty_write_ahead_log, reading, transaction

ONE = "tenant = ? AND kind = ? AND record_id = ?"
EXISTS = "(expires_at IS NULL OR expires_at > ?)"  # at a time
# not OR REPLACE: rows that it removes reach no trigger
UPSERT = (
    "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "version = excluded.version, document = excluded.document, expires_at = excluded.expires_at"
)
PAGE = 100


class SqliteRecordStore:
    """The embedded RecordStore."""

    def __init__(self, sessions: SqliteSessionStore, *, clock: Callable[[], float] = time.time) -> None:
        self._database = sessions.database
        self._clock = clock

    async def get(self, *, tenant: str, kind: Kind, record_id: str) -> Record | None:
        return (await self.get_many(tenant=tenant, kind=kind, record_ids=(record_id,)))[0]

    async def get_many(self, *, tenant: str, kind: Kind, record_ids: Sequence[str]) -> tuple[Record | None, ...]:
        query = f"SELECT version, document FROM records WHERE {ONE} AND {EXISTS}"

        def work(connection: sqlite3.Connection) -> tuple[Record | None, ...]:
            now = self._clock()
            with reading(connection):
                rows = [connection.execute(query, (tenant, kind, name, now)).fetchone() for name in record_ids]
            return tuple(
                None if row is None else _record_of(name, *row) for name, row in zip(record_ids, rows, strict=True)
            )

        return await self._database.read(work)

    async def put(
        self,
        *,
        tenant: str,
        kind: Kind,
        record_id: str,
        document: Mapping[str, Any],
        expected_version: int,
        ttl_s: float | None = None,
        holds: Collection[str] = (),
    ) -> int:
        key, version, raw = (tenant, kind, record_id), expected_version + 1, json.dumps(document)

        def work(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                now = self._clock()
                connection.execute(f"DELETE FROM records WHERE {ONE} AND NOT {EXISTS}", (*key, now))
                row = connection.execute(f"SELECT version FROM records WHERE {ONE}", key).fetchone()
                if (0 if row is None else row[0]) != expected_version:
                    raise conflict(kind, record_id, expected_version)
                connection.execute(UPSERT, (*key, version, raw, None if ttl_s is None else now + ttl_s))
                for session_id in holds:
                    _count_holders(connection, tenant, session_id, 1)
            return version

        return await self._database.write(work)

    async def let_go(self, *, tenant: str, session_ids: Collection[str]) -> tuple[str, ...]:
        def work(connection: sqlite3.Connection) -> tuple[str, ...]:
            with transaction(connection):
                return tuple(name for name in session_ids if _count_holders(connection, tenant, name, -1) == 0)

        return await self._database.write(work)

    async def delete(self, *, tenant: str, kind: Kind, record_id: str) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            with transaction(connection):
                statement = f"DELETE FROM records WHERE {ONE} AND {EXISTS}"
                was_there = connection.execute(statement, (tenant, kind, record_id, self._clock())).rowcount > 0
            if was_there:
                empty_write_ahead_log(connection)
            return was_there

        return await self._database.write(work)

    async def usage(self, *, tenant: str) -> int:
        query = "SELECT coalesce(max(num_bytes), 0) FROM record_usage WHERE tenant = ?"
        return int(await self._database.read(lambda connection: connection.execute(query, (tenant,)).fetchone()[0]))

    async def scan(self, *, tenant: str | None = None) -> AsyncIterator[OwnedRecord]:
        last = ("", "", "")
        while True:
            rows = await self._database.read(self._page_after(last, tenant))
            for owner, kind, record_id, raw in rows:
                document = _record_of(record_id, ABSENT, raw).document
                yield OwnedRecord(tenant=owner, kind=kind, record_id=record_id, document=document)
            if len(rows) < PAGE:
                return
            last = rows[-1][:3]

    def _page_after(self, key: tuple[str, str, str], tenant: str | None) -> Callable[[sqlite3.Connection], list[Any]]:
        query = (
            "SELECT tenant, kind, record_id, document FROM records WHERE (tenant, kind, record_id) > (?, ?, ?) "
            f"AND coalesce(?, tenant) = tenant AND {EXISTS} ORDER BY tenant, kind, record_id LIMIT {PAGE}"
        )
        return lambda connection: connection.execute(query, (*key, tenant, self._clock())).fetchall()

    async def remove_expired(self) -> int:
        def work(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                num_removed = connection.execute("DELETE FROM records WHERE expires_at <= ?", (self._clock(),)).rowcount
            if num_removed:
                empty_write_ahead_log(connection)
            return num_removed

        return await self._database.write(work)


def _count_holders(connection: sqlite3.Connection, tenant: str, session_id: str, change: int) -> int:
    """The holders of a session after `change`; a count of 0 is deleted. Inside the caller's transaction."""
    key = (tenant, "chain", session_id)
    row = connection.execute(f"SELECT version, document FROM records WHERE {ONE}", key).fetchone()
    version, count = ABSENT, 0
    if row is not None:
        with decoding(f"the count of holders of {session_id!r}"):
            version, count = row[0], json.loads(row[1])["num_holders"]
    count = max(0, count + change)
    if count:
        connection.execute(UPSERT, (*key, version + 1, json.dumps({"num_holders": count}), None))
    else:
        connection.execute(f"DELETE FROM records WHERE {ONE}", key)
    return int(count)


def _record_of(record_id: str, version: int, raw: str) -> Record:
    """Raises SnapshotCorrupt."""
    with decoding(f"the document {record_id!r}"):
        return Record(record_id=record_id, version=version, document=json.loads(raw))
