"""Turn records in the SQLite store."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from typing import Any, Literal

from service.stores.sessions.base import SessionHead
from service.stores.sessions.errors import require_version
from service.stores.sessions.key import SessionKey
from service.stores.sessions.lease import Lease
from service.stores.sessions.sqlite_statements import EXISTS, ONE, free_whoever, get_head, held_head, lease_left_s
from service.stores.sessions.turn_records import (
    ABANDONED_S,
    REPEATABLE,
    EndedTurn,
    TurnRecord,
    TurnStart,
    TurnStatus,
    started,
    turn_not_found,
)
from service.stores.sqlite.connection import reading, transaction, unsynced_transaction
from service.stores.sqlite.database import Database

_COLUMNS = "turn_id, identity, digest, base_version, status, request, result, is_cancel_wanted"
_ONE_TURN = f"{ONE} AND turn_id = ?"
_CURRENT = "(expires_at IS NULL OR expires_at > ?)"  # at a time


class SqliteTurns:
    """The TurnStore of a SQLite store."""

    def __init__(self, database: Database, *, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def begin_turn(self, lease: Lease, start: TurnStart, *, max_records: int) -> TurnRecord:
        def work(connection: sqlite3.Connection) -> TurnRecord:
            with unsynced_transaction(connection):
                now = self._clock()
                head = held_head(connection, lease, now)
                return find_or_begin(connection, head, start, max_records=max_records, now=now)

        return await self._database.write_short(work, is_synced=False)

    async def append_turn(self, lease: Lease, turn_id: str, *, index: int, chunk: bytes) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            with unsynced_transaction(connection):
                head = held_head(connection, lease, self._clock())
                return _append(connection, head, turn_id, index, chunk)

        return await self._database.write_short(work, is_synced=False)

    async def end_turn(self, lease: Lease, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                now = self._clock()
                head = held_head(connection, lease, now)
                _end(connection, head, ended.turn_id, status, ended.result, now + ended.ttl_s)

        await self._database.write_short(work, is_synced=True)

    async def forget_turn(self, lease: Lease, turn_id: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with unsynced_transaction(connection):
                head = held_head(connection, lease, self._clock())
                connection.execute(f"DELETE FROM turns WHERE {_ONE_TURN}", (*head.key, turn_id))

        await self._database.write_short(work, is_synced=False)

    async def get_turn(
        self,
        key: SessionKey,
        *,
        turn_id: str | None = None,
        identity: str | None = None,
        first_chunk: int = 0,
        with_request: bool = True,
    ) -> TurnRecord | None:
        processes = self._database.processes

        def work(connection: sqlite3.Connection) -> TurnRecord | None:
            with reading(connection):
                now = self._clock()
                if (
                    connection.execute(f"SELECT 1 FROM sessions WHERE {ONE} AND {EXISTS}", (*key, now)).fetchone()
                    is None
                ):
                    return None
                left_s = lease_left_s(connection, key, now=now, processes=processes)
                if identity is not None:
                    return _find_repeatable(connection, key, identity, now, first_chunk, left_s)
                return _find(connection, key, turn_id or "", now, first_chunk, left_s)

        record = await self._database.read(work)
        return record if record is None or with_request else dataclasses.replace(record, request=b"")

    async def cancel_turn(self, key: SessionKey) -> TurnRecord | None:
        processes = self._database.processes

        def work(connection: sqlite3.Connection) -> TurnRecord | None:
            with transaction(connection):
                now = self._clock()
                head = get_head(connection, key, now)
                turn_id = _running_id(connection, head)
                if turn_id is None:
                    return None
                left_s = lease_left_s(connection, head.key, now=now, processes=processes)
                if left_s:
                    statement = f"UPDATE turns SET is_cancel_wanted = 1 WHERE {_ONE_TURN}"
                    connection.execute(statement, (*head.key, turn_id))
                else:
                    _end(connection, head, turn_id, "cancelled", None, now + ABANDONED_S)
                    free_whoever(connection, head)
                return _find(connection, head.key, turn_id, now, 0, left_s)

        return await self._database.write(work)


def find_or_begin(
    connection: sqlite3.Connection, head: SessionHead, start: TurnStart, *, max_records: int, now: float
) -> TurnRecord:
    """See `TurnStore.begin_turn`; inside the caller's transaction, which holds the lease."""
    found = _find_for(connection, head, start, now)
    return found or _begin(connection, head, start, max_records=max_records, now=now)


def end_running(connection: sqlite3.Connection, head: SessionHead, committed: EndedTurn | None, now: float) -> None:
    """The session moves on, by `committed` or by something else. Inside the caller's transaction."""
    turn_id = _running_id(connection, head)
    if turn_id is None:
        return
    if committed is not None and committed.turn_id == turn_id:
        _end(connection, head, turn_id, "committed", committed.result, now + committed.ttl_s)
    else:
        _end(connection, head, turn_id, "failed", None, now + ABANDONED_S)


def drop_results(connection: sqlite3.Connection, head: SessionHead, from_version: int) -> None:
    """The session was rewound to `from_version`: results of later turns are deleted."""
    connection.execute(
        f"UPDATE turns SET status = 'cancelled', result = NULL WHERE {ONE} AND base_version >= ? "
        "AND result IS NOT NULL",
        (*head.key, from_version),
    )


def remove_expired_turns(connection: sqlite3.Connection, now: float) -> None:
    """Inside the caller's transaction."""
    due = "SELECT tenant, session_id FROM sessions WHERE records_due_at <= ?"
    statement = f"DELETE FROM turns WHERE expires_at <= ? AND (tenant, session_id) IN ({due})"
    connection.execute(statement, (now, now))
    first = "SELECT min(expires_at) FROM turns WHERE tenant = sessions.tenant AND session_id = sessions.session_id"
    connection.execute(f"UPDATE sessions SET records_due_at = ({first}) WHERE records_due_at <= ?", (now,))


def _find_for(connection: sqlite3.Connection, head: SessionHead, start: TurnStart, now: float) -> TurnRecord | None:
    """What stands in the way of a new record: this call's own one, one that it is a retry of, or one whose identity it
    has with another digest.
    """
    key = head.key
    if start.turn_id == _running_id(connection, head):
        return _find(connection, key, start.turn_id, now, 0, 0.0)
    if start.identity is None:
        return None
    query = (
        f"SELECT {_COLUMNS}, number FROM turns WHERE {ONE} AND identity = ? AND (status IN (?, ?) OR digest != ?) "
        f"AND {_CURRENT} ORDER BY number DESC LIMIT 1"
    )
    row = connection.execute(query, (*key, start.identity, *REPEATABLE, start.digest, now)).fetchone()
    return _record_of(connection, row, 0, 0.0)


def _begin(
    connection: sqlite3.Connection, head: SessionHead, start: TurnStart, *, max_records: int, now: float
) -> TurnRecord:
    key = head.key
    if start.base_version is not None:
        require_version(head, start.base_version)
    end_running(connection, head, None, now)
    connection.execute(
        f"DELETE FROM turns WHERE {ONE} AND (turn_id = ? OR NOT {_CURRENT} OR number NOT IN "
        f"(SELECT number FROM turns WHERE {ONE} ORDER BY number DESC LIMIT ?))",
        (*key, start.turn_id, now, *key, max_records - 1),
    )
    connection.execute(
        "INSERT INTO turns (tenant, session_id, turn_id, identity, digest, base_version, status, request) "
        "VALUES (?, ?, ?, ?, ?, ?, 'running', ?)",
        (*key, start.turn_id, start.identity, start.digest, head.version, start.request),
    )
    return started(start, head.version)


def _append(connection: sqlite3.Connection, head: SessionHead, turn_id: str, index: int, chunk: bytes) -> bool:
    query = f"SELECT is_cancel_wanted, number FROM turns WHERE {_ONE_TURN} AND status = 'running'"
    row = connection.execute(query, (*head.key, turn_id)).fetchone()
    if row is None:
        raise turn_not_found(turn_id)
    is_cancel_wanted, number = row
    count = "SELECT count(*) FROM turn_chunks WHERE turn_number = ?"
    (num_chunks,) = connection.execute(count, (number,)).fetchone()
    if index > num_chunks:
        raise turn_not_found(turn_id)
    if index == num_chunks:
        connection.execute("INSERT INTO turn_chunks VALUES (?, ?, ?, ?)", (number, index, chunk, head.tenant))
    return bool(is_cancel_wanted)


def _end(
    connection: sqlite3.Connection,
    head: SessionHead,
    turn_id: str,
    status: TurnStatus,
    result: bytes | None,
    expires_at: float,
) -> None:
    """One that is not running is left as it is."""
    key = (*head.key, turn_id)
    chunks = f"DELETE FROM turn_chunks WHERE turn_number IN (SELECT number FROM turns WHERE {_ONE_TURN})"
    connection.execute(chunks, key)
    connection.execute(
        f"UPDATE turns SET status = ?, request = x'', result = ?, expires_at = ? WHERE {_ONE_TURN} "
        "AND status = 'running'",
        (status, result, expires_at, *key),
    )
    # Rarely: while the session is used, the first of its records that expires is the oldest one
    due = f"UPDATE sessions SET records_due_at = ? WHERE {ONE} AND (records_due_at IS NULL OR records_due_at > ?)"
    connection.execute(due, (expires_at, *head.key, expires_at))


def _running_id(connection: sqlite3.Connection, head: SessionHead) -> str | None:
    row = connection.execute(f"SELECT turn_id FROM turns WHERE {ONE} AND status = 'running'", head.key).fetchone()
    return None if row is None else str(row[0])


def _find(
    connection: sqlite3.Connection, key: SessionKey, turn_id: str, now: float, first_chunk: int, left_s: float
) -> TurnRecord | None:
    query = f"SELECT {_COLUMNS}, number FROM turns WHERE {_ONE_TURN} AND {_CURRENT}"
    return _record_of(connection, connection.execute(query, (*key, turn_id, now)).fetchone(), first_chunk, left_s)


def _find_repeatable(
    connection: sqlite3.Connection, key: SessionKey, identity: str, now: float, first_chunk: int, left_s: float
) -> TurnRecord | None:
    query = (
        f"SELECT {_COLUMNS}, number FROM turns WHERE {ONE} AND identity = ? AND status IN (?, ?) AND {_CURRENT} "
        "ORDER BY number DESC LIMIT 1"
    )
    row = connection.execute(query, (*key, identity, *REPEATABLE, now)).fetchone()
    return _record_of(connection, row, first_chunk, left_s)


def _record_of(
    connection: sqlite3.Connection, row: tuple[Any, ...] | None, first_chunk: int, left_s: float
) -> TurnRecord | None:
    if row is None:
        return None
    *values, number = row
    fields = dict(zip(_COLUMNS.split(", "), values, strict=True))
    fields["is_cancel_wanted"] = bool(fields["is_cancel_wanted"])
    query = "SELECT chunk FROM turn_chunks WHERE turn_number = ? AND chunk_number >= ? ORDER BY chunk_number"
    chunks = tuple(bytes(chunk) for (chunk,) in connection.execute(query, (number, first_chunk)))
    return TurnRecord(**fields, chunks=chunks, lease_left_s=left_s)
