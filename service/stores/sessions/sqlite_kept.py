"""Older snapshots in the SQLite store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from service.stores.sessions.base import SessionHead
from service.stores.sessions.records import sound
from service.stores.sessions.retention import Keeping, KeptSnapshot
from service.stores.sessions.sqlite_rows import ONE, get_head
from service.stores.sqlite.connection import Runner, empty_write_ahead_log, reading, transaction
from service.stores.sqlite.reserve import RESERVE_BYTES


class SqliteKept:
    """The reading side; what a commit or a rewind does with them is in the functions below."""

    def __init__(self, *, read: Runner, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock

    async def list_kept(self, *, tenant: str, session_id: str) -> tuple[KeptSnapshot, ...]:
        def work(connection: sqlite3.Connection) -> tuple[KeptSnapshot, ...]:
            with reading(connection):
                return get_kept(connection, get_head(connection, tenant, session_id, self._clock()))

        return await self._read(work)

    async def load_kept(self, *, tenant: str, session_id: str, version: int) -> bytes | None:
        def work(connection: sqlite3.Connection) -> bytes | None:
            with reading(connection):
                get_head(connection, tenant, session_id, self._clock())
                query = f"SELECT snapshot FROM retained_snapshots WHERE {ONE} AND version = ?"
                row = connection.execute(query, (tenant, session_id, version)).fetchone()
            return sound(None if row is None else bytes(row[0]))

        return await self._read(work)


def get_kept(connection: sqlite3.Connection, head: SessionHead) -> tuple[KeptSnapshot, ...]:
    query = f"SELECT version, position, length(snapshot) FROM retained_snapshots WHERE {ONE} ORDER BY version"
    rows = connection.execute(query, (head.tenant, head.session_id)).fetchall()
    return tuple(
        KeptSnapshot(version=version, position=position, num_bytes=num_bytes) for version, position, num_bytes in rows
    )


def apply_keeping(connection: sqlite3.Connection, head: SessionHead, keep: Keeping) -> None:
    key = (head.tenant, head.session_id)
    for kept in get_kept(connection, head):
        if kept.version not in keep.stay:
            connection.execute(f"DELETE FROM retained_snapshots WHERE {ONE} AND version = ?", (*key, kept.version))
    if keep.joins is not None:
        values = (*key, keep.joins.version, keep.joins.position, keep.snapshot)
        connection.execute("INSERT INTO retained_snapshots VALUES (?, ?, ?, ?, ?)", values)


def cut_kept(connection: sqlite3.Connection, head: SessionHead, num_log_tokens: int, *, model_fingerprint: str) -> None:
    """What a rewind leaves: those of the log that stays, unless another model goes on with it."""
    end = num_log_tokens if model_fingerprint == head.model_fingerprint else 0
    statement = f"DELETE FROM retained_snapshots WHERE {ONE} AND position > ?"
    connection.execute(statement, (head.tenant, head.session_id, end))


def delete_most_kept(connection: sqlite3.Connection, tenant: str, session_id: str) -> None:
    """Before the session itself is deleted: where they take much, each goes in a transaction of its own.

    Deleting overwrites by way of the write-ahead log, and a full disk has only the reserve for that (sqlite_reserve).
    """
    query = f"SELECT version, length(snapshot) FROM retained_snapshots WHERE {ONE}"
    rows = connection.execute(query, (tenant, session_id)).fetchall()
    if sum(num_bytes for _, num_bytes in rows) <= RESERVE_BYTES // 2:
        return
    for version, _ in rows:
        with transaction(connection):
            statement = f"DELETE FROM retained_snapshots WHERE {ONE} AND version = ?"
            connection.execute(statement, (tenant, session_id, version))
        empty_write_ahead_log(connection)
