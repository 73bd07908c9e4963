"""Turn records in the SQLite store."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from service.stores.sessions.base import SessionHead
from service.stores.sessions.codec import decoding
from service.stores.sessions.errors import require_model, require_version
from service.stores.sessions.key import SessionKey
from service.stores.sessions.lease import Lease
from service.stores.sessions.sqlite_statements import (
    EXISTS,
    NO_TURN,
    ONE,
    OWN,
    RunningTurn,
    SessionRow,
    add_chunk,
    free_whoever,
    get_row,
    get_running,
    held_chunks,
    held_row,
    lease_left_s,
    row_id_of,
    row_ids_beside,
    row_ids_of,
    row_ids_of_number,
)
from service.stores.sessions.turn_records import (
    ABANDONED_S,
    EndedTurn,
    TurnRecord,
    TurnStart,
    TurnStatus,
    started,
    turn_not_found,
)
from service.stores.sqlite.connection import reading, transaction, unsynced_transaction
from service.stores.sqlite.database import Database

_ENDED = "turn_id, identity, digest, base_version, status, result"
_CURRENT = "expires_at > ?"  # at a time
# Not OR REPLACE: rows that it removes reach no trigger
_RECORD = ("turn_order", "tenant", "turn_id", "identity", "digest", "base_version", "status", "result", "expires_at")
_PUT_RECORD = (
    f"INSERT INTO turns (row_id, {', '.join(_RECORD)}) VALUES ({', '.join('?' * (len(_RECORD) + 1))}) "
    f"ON CONFLICT (row_id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _RECORD)}"
)


class _RecordRow(NamedTuple):
    """Where the record of a turn that has ended is. `is_same`: it is of the turn that begins."""

    order: int
    row_id: int
    is_same: bool


class _Ended(NamedTuple):
    """The first columns of a turn's record, which need no other page than the first."""

    row_id: int
    order: Any  # an int, unless the disk lied
    turn_id: str
    identity: str | None
    digest: str
    status: str


class SqliteTurns:
    """The TurnStore of a SQLite store."""

    def __init__(self, database: Database, *, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def begin_turn(
        self, lease: Lease, start: TurnStart, *, max_records: int, ends_abandoned: bool = True
    ) -> TurnRecord | None:
        def work(connection: sqlite3.Connection) -> TurnRecord | None:
            with unsynced_transaction(connection):
                now = self._clock()
                row = held_row(connection, lease, now)
                return find_or_begin(
                    connection, row, start, max_records=max_records, ends_abandoned=ends_abandoned, now=now
                )

        return await self._database.write_short(work, is_synced=False)

    async def append_turn(self, lease: Lease, turn_id: str, *, index: int, chunk: bytes) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            with unsynced_transaction(connection):
                now = self._clock()
                if add_chunk(connection, lease, turn_id, index=index, chunk=chunk, now=now):
                    return False
                number, num_chunks, is_cancel_wanted = held_chunks(connection, lease, turn_id, now)
                if index > num_chunks:
                    raise turn_not_found(turn_id)
                if index == num_chunks:
                    values = (row_id_of(number, index), chunk, lease.tenant)
                    connection.execute("INSERT INTO turn_chunks VALUES (?, ?, ?)", values)
                return is_cancel_wanted

        return await self._database.write_short(work, is_synced=False)

    async def end_turn(self, lease: Lease, ended: EndedTurn, *, status: Literal["failed", "cancelled"]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                now = self._clock()
                row = held_row(connection, lease, now)
                running = row.running
                if running is not None and running.turn_id == ended.turn_id:
                    _end_record(connection, row.head, running, status, ended.result, now + ended.ttl_s)
                    _stop(connection, row.head.key)

        await self._database.write_short(work, is_synced=True)

    async def forget_turn(self, lease: Lease, turn_id: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            with unsynced_transaction(connection):
                row = held_row(connection, lease, self._clock())
                running = row.running
                if running is not None and running.turn_id == turn_id:
                    _drop_chunks(connection, running)
                    _stop(connection, row.head.key)
                else:
                    row_ids = row_ids_of_number(row.number)
                    connection.execute(f"DELETE FROM turns WHERE {OWN} AND turn_id = ?", (*row_ids, turn_id))

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
                row = get_row(connection, key, now)
                head, running = row.head, row.running
                if running is None:
                    return None
                left_s = lease_left_s(connection, head.key, now=now, processes=processes)
                if left_s:
                    connection.execute(f"UPDATE sessions SET is_cancel_wanted = 1 WHERE {ONE}", key)
                else:
                    _end_record(connection, head, running, "cancelled", None, now + ABANDONED_S)
                    _stop(connection, head.key)
                    free_whoever(connection, head)
                return _find(connection, head.key, running.turn_id, now, 0, left_s)

        return await self._database.write(work)


def find_or_begin(
    connection: sqlite3.Connection,
    row: SessionRow,
    start: TurnStart,
    *,
    max_records: int,
    ends_abandoned: bool,
    now: float,
) -> TurnRecord | None:
    """See `TurnStore.begin_turn`; inside the caller's transaction, which holds the lease."""
    head, running = row.head, row.running
    found = _find_for(connection, row, start, now)
    if found is not None:
        return found
    if start.base_version is not None:
        require_version(head, start.base_version)
    require_model(head, start.model_fingerprint)
    if running is not None and not ends_abandoned:
        return None
    if running is not None:
        _end_record(connection, head, running, "failed", None, now + ABANDONED_S)
    return _begin(connection, row, start, max_records=max_records)


def end_running(connection: sqlite3.Connection, row: SessionRow, committed: EndedTurn | None, now: float) -> None:
    """The session moves on, by `committed` or something else. Inside the caller's transaction; `move_head` follows."""
    running = row.running
    if running is None:
        return
    if committed is not None and committed.turn_id == running.turn_id:
        _end_record(connection, row.head, running, "committed", committed.result, now + committed.ttl_s)
    else:
        _end_record(connection, row.head, running, "failed", None, now + ABANDONED_S)


def drop_results(connection: sqlite3.Connection, head: SessionHead, from_version: int) -> None:
    """The session was rewound to `from_version`: results of later turns are deleted."""
    connection.execute(
        f"UPDATE turns SET status = 'cancelled', result = NULL WHERE {OWN} AND base_version >= ? "
        "AND result IS NOT NULL",
        (*row_ids_of(connection, head.key), from_version),
    )


def remove_expired_turns(connection: sqlite3.Connection, now: float) -> None:
    """Inside the caller's transaction."""
    due = connection.execute("SELECT number FROM sessions WHERE records_due_at <= ?", (now,)).fetchall()
    for (number,) in due:
        row_ids = row_ids_of_number(number)
        connection.execute(f"DELETE FROM turns WHERE {OWN} AND expires_at <= ?", (*row_ids, now))
        first = f"SELECT min(expires_at) FROM turns WHERE {OWN}"
        connection.execute(f"UPDATE sessions SET records_due_at = ({first}) WHERE number = ?", (*row_ids, number))


def _list_ended(connection: sqlite3.Connection, row: SessionRow) -> list[_Ended]:
    """The session's records of turns that have ended, the oldest first."""
    query = f"SELECT row_id, turn_order, turn_id, identity, digest, status FROM turns WHERE {OWN} ORDER BY turn_order"
    return [_Ended(*values) for values in connection.execute(query, row_ids_of_number(row.number))]


def _record_rows(connection: sqlite3.Connection, row: SessionRow, turn_id: str) -> list[_RecordRow]:
    """Of the session's records of turns that have ended, the oldest first; by one row, since SQLite gives up the
    interpreter's lock for each.
    """
    query = f"SELECT group_concat(turn_order || ' ' || row_id || ' ' || (turn_id = ?)) FROM turns WHERE {OWN}"
    (listed,) = connection.execute(query, (turn_id, *row_ids_of_number(row.number))).fetchone()
    if listed is None:
        return []
    with decoding(f"a turn record of session {row.head.session_id!r}"):
        records = (map(int, record.split(" ")) for record in listed.split(","))
        return sorted(_RecordRow(order, row_id, bool(is_same)) for order, row_id, is_same in records)


def _find_for(connection: sqlite3.Connection, row: SessionRow, start: TurnStart, now: float) -> TurnRecord | None:
    """What stands in the way of a new record: this call's own one, one that it is a retry of, or one whose identity it
    has with another digest.
    """
    running = row.running
    if running is not None and (
        running.turn_id == start.turn_id or (start.identity is not None and running.identity == start.identity)
    ):
        return _running_record(connection, row.head.key, running, 0, 0.0)
    if start.identity is None:
        return None
    for record in reversed(_list_ended(connection, row)):
        if record.identity == start.identity and (record.status == "committed" or record.digest != start.digest):
            query = f"SELECT {_ENDED} FROM turns WHERE row_id = ? AND {_CURRENT}"
            values = connection.execute(query, (record.row_id, now)).fetchone()
            if values is not None:
                return _ended_record(values, 0.0)
    return None


def _begin(connection: sqlite3.Connection, row: SessionRow, start: TurnStart, *, max_records: int) -> TurnRecord:
    records = _record_rows(connection, row, start.turn_id)
    row_id, order = _next_row_id(connection, row, records, max_records=max_records)
    connection.execute(
        "UPDATE sessions SET turn_id = ?, turn_identity = ?, turn_digest = ?, turn_base_version = ?, turn_row_id = ?, "
        f"turn_order = ?, is_cancel_wanted = 0, turn_request = ? WHERE {ONE}",
        (
            *(start.turn_id, start.identity, start.digest, row.head.version, row_id, order, start.request),
            *row.head.key,
        ),
    )
    return started(start, row.head.version)


def _next_row_id(
    connection: sqlite3.Connection, row: SessionRow, records: Sequence[_RecordRow], *, max_records: int
) -> tuple[int, int]:
    """Row id and order of a turn that begins. It takes the row of the oldest record if there are as many as may be,
    which stays until it ends: so a turn that begins writes no page of records.
    """
    order = records[-1].order + 1 if records else 1
    same = [record.row_id for record in records if record.is_same]
    row_ids = [record.row_id for record in records if not record.is_same]
    num_over = len(row_ids) - (max_records - 1)
    for row_id in [*same, *row_ids[: max(0, num_over - 1)]]:  # a retry under the same id, or fewer may be than before
        connection.execute("DELETE FROM turns WHERE row_id = ?", (row_id,))
    if num_over > 0:
        return row_ids[num_over - 1], order
    first, last = row_ids_of_number(row.number)
    return next(row_id for row_id in range(first, last) if row_id not in row_ids), order


def _end_record(
    connection: sqlite3.Connection,
    head: SessionHead,
    running: RunningTurn,
    status: TurnStatus,
    result: bytes | None,
    expires_at: float,
) -> None:
    """Whoever calls writes the session's row afterwards: its running turn is still there."""
    connection.execute(
        _PUT_RECORD,
        (
            *(running.row_id, running.order, head.tenant, running.turn_id, running.identity, running.digest),
            *(running.base_version, status, result, expires_at),
        ),
    )
    _drop_chunks(connection, running)
    if running.records_due_at is None or running.records_due_at > expires_at:  # the oldest one is seldom the last
        connection.execute(f"UPDATE sessions SET records_due_at = ? WHERE {ONE}", (expires_at, *head.key))


def _drop_chunks(connection: sqlite3.Connection, running: RunningTurn) -> None:
    connection.execute(f"DELETE FROM turn_chunks WHERE {OWN}", row_ids_beside(running.row_id))


def _stop(connection: sqlite3.Connection, key: SessionKey) -> None:
    """Nothing runs in the session any more."""
    connection.execute(f"UPDATE sessions SET {NO_TURN} WHERE {ONE}", key)


def _find(
    connection: sqlite3.Connection, key: SessionKey, turn_id: str, now: float, first_chunk: int, left_s: float
) -> TurnRecord | None:
    running = get_running(connection, key)
    if running is not None and running.turn_id == turn_id:
        return _running_record(connection, key, running, first_chunk, left_s)
    query = f"SELECT {_ENDED} FROM turns WHERE {OWN} AND turn_id = ? AND {_CURRENT}"
    return _ended_record(connection.execute(query, (*row_ids_of(connection, key), turn_id, now)).fetchone(), left_s)


def _find_repeatable(
    connection: sqlite3.Connection, key: SessionKey, identity: str, now: float, first_chunk: int, left_s: float
) -> TurnRecord | None:
    running = get_running(connection, key)
    if running is not None and running.identity == identity:
        return _running_record(connection, key, running, first_chunk, left_s)
    query = (
        f"SELECT {_ENDED} FROM turns WHERE {OWN} AND identity = ? AND status = 'committed' AND {_CURRENT} "
        "ORDER BY turn_order DESC LIMIT 1"
    )
    return _ended_record(connection.execute(query, (*row_ids_of(connection, key), identity, now)).fetchone(), left_s)


def _running_record(
    connection: sqlite3.Connection, key: SessionKey, running: RunningTurn, first_chunk: int, left_s: float
) -> TurnRecord:
    first, last = row_ids_of(connection, key)
    query = f"SELECT chunk FROM turn_chunks WHERE {OWN} ORDER BY row_id"
    chunks = tuple(bytes(chunk) for (chunk,) in connection.execute(query, (first + first_chunk, last)))
    return TurnRecord(
        turn_id=running.turn_id,
        identity=running.identity,
        digest=running.digest,
        base_version=running.base_version,
        status="running",
        request=running.request,
        chunks=chunks,
        is_cancel_wanted=bool(running.is_cancel_wanted),
        lease_left_s=left_s,
    )


def _ended_record(row: tuple[Any, ...] | None, left_s: float) -> TurnRecord | None:
    if row is None:
        return None
    fields = dict(zip(_ENDED.split(", "), row, strict=True))
    return TurnRecord(**fields, request=b"", lease_left_s=left_s)
