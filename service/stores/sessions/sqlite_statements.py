"""Statements of the SQLite store: sessions, their log, leases and snapshots as rows.

All of them run inside a caller's transaction or read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sqlite3
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from nsm_core.errors import LogCorrupt, NotFound, SnapshotCorrupt
from nsm_core.hashing import checksum
from service.stores.sessions.base import Commit, Lease, LogMark, LogPoint, LogTail, Rewind, SessionHead
from service.stores.sessions.codec import DAMAGE, TOKEN_BYTES, decode_ids, decoding, encode_ids, expiry
from service.stores.sessions.errors import (
    already_exists,
    lease_lost,
    log_corrupt,
    not_found,
    require_version,
    session_busy,
    session_expired,
)
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot, Retention, Shedding
from service.stores.sessions.turn_records import turn_not_found
from service.stores.sqlite.connection import empty_write_ahead_log, transaction
from service.stores.sqlite.process_lock import Processes

HEAD_COLUMNS = (
    "tenant, session_id, version, position, created_at, updated_at, model_fingerprint, metadata, num_log_tokens, "
    "snapshot_bytes, ttl_s, expires_at, forked_from, snapshot_version, snapshot_position, tokenizer_fingerprint, "
    "numerics, energy_joules, replica"
)
_HEAD_NAMES = HEAD_COLUMNS.split(", ")
_LEASE_COLUMNS = "number, fence, lease_holder, lease_owner, lease_expires_at"
_RUNNING_COLUMNS = (
    "turn_id, turn_identity, turn_digest, turn_base_version, turn_request, is_cancel_wanted, turn_row_id, turn_order, "
    "records_due_at"
)
# After a disk that lied they may be others
_RUNNING_TYPES: tuple[Any, ...] = (str, (str, type(None)), str, int, bytes, int, int, int, (float, type(None)))
_ROW_COLUMNS = f"{HEAD_COLUMNS}, {_LEASE_COLUMNS}, {_RUNNING_COLUMNS}"
_LEASE_END = len(_HEAD_NAMES) + len(_LEASE_COLUMNS.split(", "))
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
REMEMBERED_S = 30 * 86_400.0  # how long the id of an expired session is known as such
BY_KEY = ("snapshots", "older_snapshots")  # tables whose rows have the session's key
BY_ROW_ID = ("log_chunks", "turns", "turn_chunks")  # and those whose row ids begin with its number
ONE = "tenant = ? AND session_id = ?"
OWN = "row_id BETWEEN ? AND ?"  # see `row_ids_of`
VERSION = "(row_id & 4294967295)"  # of a row of log_chunks
EXISTS = "(expires_at IS NULL OR max(expires_at, lease_expires_at) > ?)"  # at a time


@dataclasses.dataclass(frozen=True, slots=True)
class RunningTurn:
    """The record of the running turn, which is in its session's row. `row_id`: where it goes in `turns` at its end.
    `records_due_at`: when the first of the session's records expires.
    """

    turn_id: str
    identity: str | None
    digest: str
    base_version: int
    request: bytes
    is_cancel_wanted: int
    row_id: int
    order: int
    records_due_at: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRow:
    """What the transactions of a turn read of a session, by one query. `lease`: its _LEASE_COLUMNS but the first."""

    head: SessionHead
    number: int
    lease: tuple[Any, ...]
    running: RunningTurn | None


def head_of(row: tuple[Any, ...]) -> SessionHead:
    """A row of HEAD_COLUMNS, which are in the dataclass's order."""
    fields = dict(zip(_HEAD_NAMES, row, strict=True))
    try:  # not `decoding`, which takes as long again
        raw = fields["metadata"]
        fields["metadata"] = _NO_METADATA if raw == "{}" else MappingProxyType(dict(json.loads(raw)))
        return SessionHead(**fields)
    except DAMAGE as cause:
        raise SnapshotCorrupt(f"the head of session {fields['session_id']!r} is damaged") from cause


def _row_of(values: tuple[Any, ...]) -> SessionRow:
    """A row of _ROW_COLUMNS. Raises SnapshotCorrupt."""
    number, *lease = values[len(_HEAD_NAMES) : _LEASE_END]
    head = head_of(values[: len(_HEAD_NAMES)])
    return SessionRow(head, number, tuple(lease), _running_of(head.session_id, values[_LEASE_END:]))


def _running_of(session_id: str, values: tuple[Any, ...]) -> RunningTurn | None:
    """_RUNNING_COLUMNS of a session's row. Raises SnapshotCorrupt."""
    if values[0] is None:
        return None
    if not all(map(isinstance, values, _RUNNING_TYPES)):
        raise SnapshotCorrupt(f"the running turn of session {session_id!r} is damaged")
    return RunningTurn(*values)


def get_running(connection: sqlite3.Connection, key: SessionKey) -> RunningTurn | None:
    """Of a session that exists."""
    query = f"SELECT {_RUNNING_COLUMNS} FROM sessions WHERE {ONE} AND turn_id IS NOT NULL"
    values = connection.execute(query, key).fetchone()
    return None if values is None else _running_of(key.session_id, values)


def get_row(connection: sqlite3.Connection, key: SessionKey, now: float) -> SessionRow:
    """Raises NotFound."""
    return _row_of(_values_of(connection, key, _ROW_COLUMNS, now))


def _values_of(connection: sqlite3.Connection, key: SessionKey, columns: str, now: float) -> tuple[Any, ...]:
    """Columns of a session that exists at a time. Raises NotFound."""
    query = f"SELECT {columns} FROM sessions WHERE {ONE} AND {EXISTS}"
    values: tuple[Any, ...] | None = connection.execute(query, (*key, now)).fetchone()
    if values is None:
        raise missing(connection, key)
    return values


def row_id_of(number: int, index: int) -> int:
    """Of a row that belongs to session `number`: the other half is `index`."""
    return number << 32 | index


def row_ids_of_number(number: int) -> tuple[int, int]:
    """The first and the last row id that rows of session `number` may have: the parameters of OWN."""
    return row_id_of(number, 0), row_id_of(number + 1, 0) - 1


def row_ids_beside(row_id: int) -> tuple[int, int]:
    """The same of the session that has a row with this id."""
    return row_ids_of_number(row_id >> 32)


def row_ids_of(connection: sqlite3.Connection, key: SessionKey) -> tuple[int, int]:
    """The same of the session with this key."""
    (number,) = connection.execute(f"SELECT number FROM sessions WHERE {ONE}", key).fetchone()
    return row_ids_of_number(number)


def get_head(connection: sqlite3.Connection, key: SessionKey, now: float) -> SessionHead:
    """Raises NotFound."""
    return head_of(_values_of(connection, key, HEAD_COLUMNS, now))


def missing(connection: sqlite3.Connection, key: SessionKey) -> NotFound:
    """Why a session that was not found is not there."""
    query = f"SELECT 1 FROM sessions WHERE {ONE} UNION SELECT 1 FROM expired_sessions WHERE {ONE}"
    is_known = connection.execute(query, (*key, *key)).fetchone() is not None
    return session_expired(key.session_id) if is_known else not_found(key.session_id)


def remember_expired(connection: sqlite3.Connection, now: float) -> None:
    """Of the sessions that are about to be removed; those of long ago are forgotten."""
    connection.execute(
        "INSERT OR REPLACE INTO expired_sessions SELECT tenant, session_id, expires_at FROM sessions "
        f"WHERE expires_at <= ? AND NOT {EXISTS}",
        (now, now),
    )
    connection.execute("DELETE FROM expired_sessions WHERE expired_at <= ?", (now - REMEMBERED_S,))


def insert_head(connection: sqlite3.Connection, head: SessionHead) -> None:
    """A new session; takes the place of one that expired. Raises VersionConflict when the id exists."""
    key = head.key
    connection.execute(f"DELETE FROM expired_sessions WHERE {ONE}", key)
    connection.execute(f"DELETE FROM sessions WHERE {ONE} AND NOT {EXISTS}", (*key, head.created_at))
    if connection.execute(f"SELECT 1 FROM sessions WHERE {ONE}", key).fetchone() is not None:
        raise already_exists(head.session_id)
    (number,) = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM sessions").fetchone()
    for table in BY_KEY:  # left by damage; they would be taken for the new session's
        connection.execute(f"DELETE FROM {table} WHERE {ONE}", key)
    for table in BY_ROW_ID:
        connection.execute(f"DELETE FROM {table} WHERE {OWN}", row_ids_of_number(number))
    names = HEAD_COLUMNS.split(", ")
    values = [json.dumps(dict(head.metadata)) if name == "metadata" else getattr(head, name) for name in names]
    placeholders = ", ".join("?" * (len(names) + 1))
    connection.execute(f"INSERT INTO sessions ({HEAD_COLUMNS}, number) VALUES ({placeholders})", (*values, number))


def get_snapshot(connection: sqlite3.Connection, key: SessionKey, version: int) -> bytes | None:
    """As a stream: a column of a row would be copied twice on its way."""
    query = f"SELECT rowid, snapshot IS NULL OR typeof(snapshot) != 'blob' FROM snapshots WHERE {ONE} AND version = ?"
    row = connection.execute(query, (*key, version)).fetchone()
    if row is None:
        return None
    rowid, is_damaged = row
    if is_damaged:
        return b""
    with connection.blobopen("snapshots", "snapshot", rowid, readonly=True) as stream:
        return bytes(stream.read())


def _put_snapshot(connection: sqlite3.Connection, key: SessionKey, version: int, snapshot: bytes) -> None:
    """The last column is written into its pages directly."""
    statement = "INSERT INTO snapshots VALUES (?, ?, ?, zeroblob(?))"
    cursor = connection.execute(statement, (*key, version, len(snapshot)))
    with connection.blobopen("snapshots", "snapshot", cursor.lastrowid or 0) as stream:
        stream.write(snapshot)


def replace_snapshot(
    connection: sqlite3.Connection, head: SessionHead, *, version: int, snapshot: bytes | None, is_in_memory: bool
) -> None:
    """All but the older ones go. In a file they go first: the new one then takes their pages, and they are written
    once. In memory they go last: pages that one transaction leaves and takes again would be copied, for a rollback.
    """
    if not is_in_memory:
        drop_snapshots(connection, head, but=0)
    if snapshot is not None:
        _put_snapshot(connection, head.key, version, snapshot)
    if is_in_memory:
        drop_snapshots(connection, head, but=version)


def append_chunk(
    connection: sqlite3.Connection, head: SessionHead, ids: tuple[int, ...], mark: LogMark | Commit | Rewind
) -> None:
    """The tokens that the version of `mark` added to the log."""
    raw, seed = encode_ids(ids), None if mark.seed is None else str(mark.seed)
    connection.execute(
        f"INSERT INTO log_chunks SELECT number << 32 | ?, ?, ?, ?, ? FROM sessions WHERE {ONE}",
        (mark.version, raw, mark.num_sampled, seed, checksum(raw), *head.key),
    )


def append_new(connection: sqlite3.Connection, head: SessionHead, commit: Commit) -> None:
    """What a commit adds to the log: one version, or two."""
    num_before = commit.num_before_border
    if num_before is not None:
        end = head.num_log_tokens + num_before
        mark = LogMark(version=commit.version - 1, num_log_tokens=end, num_sampled=0, seed=commit.seed)
        append_chunk(connection, head, commit.new_ids[:num_before], mark)
    append_chunk(connection, head, commit.new_ids[num_before or 0 :], commit)


def append_log(
    connection: sqlite3.Connection, head: SessionHead, log_ids: tuple[int, ...], marks: Iterable[LogMark]
) -> None:
    """A whole log, cut into chunks at its marks."""
    start = 0
    for mark in marks:
        ids = log_ids[start : mark.num_log_tokens]
        append_chunk(connection, head, ids, mark)
        start = mark.num_log_tokens


def get_marks(connection: sqlite3.Connection, head: SessionHead) -> tuple[LogMark, ...]:
    query = f"SELECT {VERSION}, length(ids), num_sampled, seed FROM log_chunks WHERE {OWN} ORDER BY row_id"
    rows = connection.execute(query, row_ids_of(connection, head.key)).fetchall()
    ends = itertools.accumulate(num_bytes // TOKEN_BYTES for _, num_bytes, _, _ in rows)
    return tuple(_mark(head, (row[0], row[2], row[3]), end) for row, end in zip(rows, ends, strict=True))


def get_log(connection: sqlite3.Connection, head: SessionHead) -> tuple[int, ...]:
    """Raises LogCorrupt when it is damaged."""
    query = f"SELECT ids, checksum FROM log_chunks WHERE {OWN} ORDER BY row_id"
    rows = connection.execute(query, row_ids_of(connection, head.key)).fetchall()
    if any(checksum(ids) != stored for ids, stored in rows):
        raise log_corrupt(head, "a part of it fails its checksum")
    raw = b"".join(ids for ids, _ in rows)
    if len(raw) != TOKEN_BYTES * head.num_log_tokens:
        raise log_corrupt(head, f"it has {len(raw)} bytes for {head.num_log_tokens} tokens")
    return decode_ids(raw)


def get_tail(connection: sqlite3.Connection, head: SessionHead) -> LogTail:
    """Raises LogCorrupt when this part of the log is damaged."""
    num_left, end = head.num_log_tokens - head.snapshot_position, head.num_log_tokens
    query = f"SELECT {VERSION}, ids, num_sampled, seed, checksum FROM log_chunks WHERE {OWN} ORDER BY row_id DESC"
    parts: list[bytes] = []
    marks: list[LogMark] = []
    for version, raw, num_sampled, seed, stored in connection.execute(query, row_ids_of(connection, head.key)):
        if num_left <= 0 and version <= head.snapshot_version:
            break
        if checksum(raw) != stored:
            raise log_corrupt(head, "a part of it fails its checksum")
        if version > head.snapshot_version:
            marks.append(_mark(head, (version, num_sampled, seed), end))
        parts.append(raw)
        num_left -= len(raw) // TOKEN_BYTES
        end -= len(raw) // TOKEN_BYTES
    if num_left > 0:
        raise log_corrupt(head, f"{num_left} tokens after its newest snapshot are missing")
    ids = decode_ids(b"".join(reversed(parts)))
    return LogTail(ids=ids[-num_left:] if num_left else ids, marks=tuple(reversed(marks)))


def _mark(head: SessionHead, row: tuple[int, int, str | None], end: int) -> LogMark:
    version, num_sampled, seed = row
    with decoding(f"the token log of session {head.session_id!r}", error=LogCorrupt):
        return LogMark(
            version=version, num_log_tokens=end, num_sampled=num_sampled, seed=None if seed is None else int(seed)
        )


def has_version(connection: sqlite3.Connection, head: SessionHead, *, version: int, position: int) -> bool:
    """Whether a turn of the log ended as this version, with all `position` tokens fed or one less."""
    query = f"SELECT coalesce(sum(length(ids)), 0), max{VERSION} FROM log_chunks WHERE {OWN}"
    first, _ = row_ids_of(connection, head.key)
    num_bytes, newest = connection.execute(query, (first, first | version)).fetchone()
    return bool(newest == version and num_bytes // TOKEN_BYTES - position in (0, 1))


def require_log(connection: sqlite3.Connection, head: SessionHead) -> None:
    """Number and length of its parts against the head, without reading them. Raises LogCorrupt."""
    query = f"SELECT coalesce(sum(length(ids)), 0), coalesce(max{VERSION}, 0) FROM log_chunks WHERE {OWN}"
    num_bytes, version = connection.execute(query, row_ids_of(connection, head.key)).fetchone()
    if num_bytes != TOKEN_BYTES * head.num_log_tokens:
        raise log_corrupt(head, f"it has {num_bytes} bytes for {head.num_log_tokens} tokens")
    if version != head.version:
        raise log_corrupt(head, f"it ends at version {version}, the session is at {head.version}")


def require_log_end(connection: sqlite3.Connection, row: SessionRow) -> None:
    """`require_log` for a caller that needs no more of the log: of its newest part alone. Raises LogCorrupt."""
    head = row.head
    query = f"SELECT {VERSION}, ids, checksum FROM log_chunks WHERE {OWN} ORDER BY row_id DESC LIMIT 1"
    found = connection.execute(query, row_ids_of_number(row.number)).fetchone()
    version, ids, stored = found or (0, b"", checksum(b""))
    if version != head.version:
        raise log_corrupt(head, f"it ends at version {version}, the session is at {head.version}")
    if checksum(ids) != stored:
        raise log_corrupt(head, "a part of it fails its checksum")


def cut_log(connection: sqlite3.Connection, head: SessionHead, rewind: Rewind) -> int:
    """Drops the chunks beyond the cut; the rest of the first of them becomes the new version's.

    Returns the newest version that is left whole, 0 for none.
    """
    end = rewind.num_log_tokens
    left = [mark for mark in get_marks(connection, head) if mark.num_log_tokens <= end]
    last_version, start = (left[-1].version, left[-1].num_log_tokens) if left else (0, 0)
    rest = get_log(connection, head)[start:end]
    _cut_chunks(connection, head, last_version)
    append_chunk(connection, head, rest, rewind)
    return int(last_version)


def _cut_chunks(connection: sqlite3.Connection, head: SessionHead, last_version: int) -> None:
    """Deletes those of later versions."""
    first, last = row_ids_of(connection, head.key)
    connection.execute(f"DELETE FROM log_chunks WHERE {OWN}", ((first | last_version) + 1, last))


def cut_behind(connection: sqlite3.Connection, head: SessionHead, end: LogPoint) -> SessionHead:
    """Drops what log and snapshots have behind the end of a version. Raises LogCorrupt where that is not in the log."""
    _cut_chunks(connection, head, end.version)
    query = f"SELECT coalesce(sum(length(ids)), 0), max{VERSION} FROM log_chunks WHERE {OWN}"
    found = connection.execute(query, row_ids_of(connection, head.key)).fetchone()
    if found != (TOKEN_BYTES * end.num_log_tokens, end.version):
        raise log_corrupt(head, f"version {end.version} does not end after {end.num_log_tokens} tokens")
    connection.execute(f"DELETE FROM older_snapshots WHERE {ONE} AND version > ?", (*head.key, end.version))
    if head.snapshot_version > end.version:
        head = note_snapshot(connection, head, version=0, position=0, num_bytes=0)
    drop_snapshots(connection, head, but=head.snapshot_version)
    return dataclasses.replace(head, num_log_tokens=end.num_log_tokens)


_FREE = "lease_holder = NULL, lease_owner = NULL, lease_expires_at = 0"
NO_TURN = (
    "turn_id = NULL, turn_identity = NULL, turn_digest = NULL, turn_base_version = NULL, turn_row_id = NULL, "
    "turn_order = NULL, is_cancel_wanted = 0, turn_request = NULL"
)
_IS_HELD = "created_at = ? AND lease_holder = ? AND fence = ?"  # the newest lease, of this incarnation
_HELD = f"{ONE} AND {_IS_HELD}"


def take(
    connection: sqlite3.Connection,
    row: SessionRow,
    *,
    holder: str,
    now: float,
    lease_s: float,
    processes: Processes,
) -> Lease:
    """Raises SessionBusy while another lease lives and the store that took it is open."""
    head, (fence, old_holder, old_owner, old_expires_at) = row.head, row.lease
    with decoding(f"the lease of session {head.session_id!r}"):
        fence, left_s = int(fence), float(old_expires_at) - now
    if old_holder is not None and left_s > 0 and not processes.is_gone(old_owner):
        raise session_busy(head.session_id, left_s)
    connection.execute(
        f"UPDATE sessions SET fence = ?, lease_holder = ?, lease_owner = ?, lease_expires_at = ? WHERE {ONE}",
        (fence + 1, holder, processes.name, now + lease_s, *head.key),
    )
    return Lease(
        tenant=head.tenant,
        session_id=head.session_id,
        created_at=head.created_at,
        holder=holder,
        fence=fence + 1,
        expires_at=now + lease_s,
    )


def renewed(connection: sqlite3.Connection, lease: Lease, *, now: float, lease_s: float) -> Lease:
    """Raises LeaseLost."""
    statement = f"UPDATE sessions SET lease_expires_at = ? WHERE {_HELD} AND {EXISTS}"
    if connection.execute(statement, (now + lease_s, *_names(lease), now)).rowcount == 0:
        raise lease_lost(lease)
    return dataclasses.replace(lease, expires_at=now + lease_s)


def free(connection: sqlite3.Connection, lease: Lease) -> None:
    """A lease that is lost, or released already, is left alone."""
    connection.execute(f"UPDATE sessions SET {_FREE} WHERE {_HELD}", _names(lease))


def free_whoever(connection: sqlite3.Connection, head: SessionHead) -> None:
    """Whoever still has a lease that ran out has none from now on."""
    connection.execute(f"UPDATE sessions SET {_FREE} WHERE {ONE}", head.key)


def lease_left_s(connection: sqlite3.Connection, key: SessionKey, *, now: float, processes: Processes) -> float:
    """How long the session's lease still holds; 0 when nobody has it, or whoever had it is gone."""
    query = f"SELECT lease_holder, lease_owner, lease_expires_at FROM sessions WHERE {ONE}"
    holder, owner, expires_at = connection.execute(query, key).fetchone()
    if holder is None or expires_at <= now or processes.is_gone(owner):
        return 0.0
    return float(expires_at - now)


def held_row(connection: sqlite3.Connection, lease: Lease, now: float) -> SessionRow:
    """The row of the session that `lease` holds. Raises NotFound or LeaseLost."""
    query = f"SELECT {_ROW_COLUMNS}, {_IS_HELD} FROM sessions WHERE {ONE} AND {EXISTS}"
    held = (lease.created_at, lease.holder, lease.fence)
    values = connection.execute(query, (*held, *lease.key, now)).fetchone()
    if values is None:
        raise missing(connection, lease.key)
    if not values[-1]:
        raise lease_lost(lease)
    return _row_of(values[:-1])


_NUM_CHUNKS = "SELECT count(*) FROM turn_chunks WHERE row_id BETWEEN number << 32 AND number << 32 | 4294967295"
_ADD_CHUNK = (
    "INSERT INTO turn_chunks SELECT number << 32 | ?, ?, tenant FROM sessions "
    f"WHERE {ONE} AND {_IS_HELD} AND {EXISTS} AND turn_id = ? AND is_cancel_wanted = 0 AND ({_NUM_CHUNKS}) = ?"
)


def add_chunk(
    connection: sqlite3.Connection, lease: Lease, turn_id: str, *, index: int, chunk: bytes, now: float
) -> bool:
    """Tokens of the running turn, by one statement. False where something stands against it: `held_chunks` tells."""
    values = (index, chunk, *_names(lease), now, turn_id, index)
    return connection.execute(_ADD_CHUNK, values).rowcount == 1


def held_chunks(connection: sqlite3.Connection, lease: Lease, turn_id: str, now: float) -> tuple[int, int, bool]:
    """Of the running turn of the session that `lease` holds: the session's number, how many chunks of tokens it has,
    and whether a cancel is wanted. Raises NotFound, also where another turn runs, or LeaseLost.
    """
    query = (
        f"SELECT number, turn_id, is_cancel_wanted, {_IS_HELD}, ({_NUM_CHUNKS}) FROM sessions WHERE {ONE} AND {EXISTS}"
    )
    held = (lease.created_at, lease.holder, lease.fence)
    values = connection.execute(query, (*held, *lease.key, now)).fetchone()
    if values is None:
        raise missing(connection, lease.key)
    number, running_id, is_cancel_wanted, is_held, num_written = values
    if not is_held:
        raise lease_lost(lease)
    if running_id != turn_id:
        raise turn_not_found(turn_id)
    return number, num_written, bool(is_cancel_wanted)


def writable_row(connection: sqlite3.Connection, lease: Lease, expected_version: int, now: float) -> SessionRow:
    """The row that `lease` may move on. Raises NotFound, LeaseLost or VersionConflict."""
    row = held_row(connection, lease, now)
    require_version(row.head, expected_version)
    return row


def move_head(
    connection: sqlite3.Connection, head: SessionHead, change: Commit | Rewind, *, num_log_tokens: int, now: float
) -> SessionHead:
    """To the next version; the session is free again, and no turn runs in it."""
    new = dataclasses.replace(
        head,
        version=change.version,
        position=change.position,
        updated_at=now,
        model_fingerprint=change.model_fingerprint,
        num_log_tokens=num_log_tokens,
        expires_at=expiry(now, head.ttl_s),
        tokenizer_fingerprint=change.tokenizer_fingerprint,
        numerics=change.numerics,
        energy_joules=change.energy_joules,
        replica=change.replica,
    )
    connection.execute(
        "UPDATE sessions SET version = ?, position = ?, updated_at = ?, model_fingerprint = ?, num_log_tokens = ?, "
        "expires_at = ?, tokenizer_fingerprint = ?, numerics = ?, energy_joules = ?, replica = ?, "
        f"{_FREE}, {NO_TURN} WHERE {ONE}",
        (new.version, new.position, now, new.model_fingerprint, num_log_tokens, new.expires_at,
         new.tokenizer_fingerprint, new.numerics, new.energy_joules, new.replica, *head.key),
    )  # fmt: skip
    return new


def note_snapshot(
    connection: sqlite3.Connection, head: SessionHead, *, version: int, position: int, num_bytes: int
) -> SessionHead:
    """The head names its newest snapshot."""
    connection.execute(
        f"UPDATE sessions SET snapshot_version = ?, snapshot_position = ?, snapshot_bytes = ? WHERE {ONE}",
        (version, position, num_bytes, *head.key),
    )
    return dataclasses.replace(head, snapshot_version=version, snapshot_position=position, snapshot_bytes=num_bytes)


def _names(lease: Lease) -> tuple[str, str, float, str, int]:
    """The parameters of _HELD."""
    return (*lease.key, lease.created_at, lease.holder, lease.fence)


def get_retained(connection: sqlite3.Connection, head: SessionHead) -> tuple[RetainedSnapshot, ...]:
    query = f"SELECT version, position, num_bytes FROM older_snapshots WHERE {ONE} ORDER BY version"
    rows = connection.execute(query, head.key).fetchall()
    return tuple(
        RetainedSnapshot(version=version, position=position, num_bytes=num_bytes)
        for version, position, num_bytes in rows
    )


def apply_retention(connection: sqlite3.Connection, head: SessionHead, retention: Retention) -> None:
    """Says which of a session's snapshots are its older ones when `replace_snapshot` stores a newer one."""
    key = head.key
    for snapshot in get_retained(connection, head):
        if snapshot.version not in retention.keep:
            connection.execute(f"DELETE FROM older_snapshots WHERE {ONE} AND version = ?", (*key, snapshot.version))
    if head.snapshot_version in retention.keep:
        connection.execute(
            f"INSERT INTO older_snapshots SELECT tenant, session_id, version, ?, ? FROM snapshots WHERE {ONE} "
            "AND version = ?",
            (head.snapshot_position, head.snapshot_bytes, *key, head.snapshot_version),
        )


def cut_retained(connection: sqlite3.Connection, head: SessionHead, rewind: Rewind) -> None:
    """Before `replace_snapshot`, those beyond the cut are none any more; all, when another model made the state."""
    end = rewind.num_log_tokens if rewind.model_fingerprint == head.model_fingerprint else 0
    connection.execute(f"DELETE FROM older_snapshots WHERE {ONE} AND position > ?", (*head.key, end))


def delete_retained(connection: sqlite3.Connection, key: SessionKey) -> None:
    """Each in a transaction of its own: deletion overwrites by way of the write-ahead log, which stays small so."""
    query = f"SELECT version FROM older_snapshots WHERE {ONE}"
    for row in connection.execute(query, key).fetchall():
        with transaction(connection):
            for table in ("older_snapshots", "snapshots"):
                connection.execute(f"DELETE FROM {table} WHERE {ONE} AND version = ?", (*key, *row))
        empty_write_ahead_log(connection)


def list_idle(connection: sqlite3.Connection, shedding: Shedding, *, until: float) -> list[SessionKey]:
    """Sessions with snapshots to lose that nobody has used since `until`."""
    table, of_model = "older_snapshots", ""
    if shedding.of_model is not None:
        table, of_model = "snapshots", "AND model_fingerprint = ? AND numerics = ?"
    query = (
        f"SELECT DISTINCT tenant, session_id FROM {table} JOIN sessions USING (tenant, session_id) "
        f"WHERE updated_at <= ? {of_model} LIMIT ?"
    )
    rows = connection.execute(query, (until, *(shedding.of_model or ()), shedding.limit)).fetchall()
    return list(itertools.starmap(SessionKey, rows))


def find_idle(connection: sqlite3.Connection, key: SessionKey, *, until: float, now: float) -> SessionHead | None:
    """The head of a session that nobody has used since `until`, and nobody uses."""
    query = f"SELECT {HEAD_COLUMNS} FROM sessions WHERE {ONE} AND updated_at <= ? AND lease_expires_at <= ?"
    row = connection.execute(query, (*key, until, now)).fetchone()
    return None if row is None else head_of(row)


def drop_snapshots(connection: sqlite3.Connection, head: SessionHead, *, but: int) -> None:
    """All of the session's snapshots that are no older ones, but the one of version `but`."""
    stay = f"SELECT version FROM older_snapshots WHERE {ONE}"
    statement = f"DELETE FROM snapshots WHERE {ONE} AND version != ? AND version NOT IN ({stay})"
    connection.execute(statement, (*head.key, but, *head.key))
