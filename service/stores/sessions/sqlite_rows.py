"""Statements of the SQLite store: rows to values and back. All of them run inside a caller's transaction or read."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from nsm_core.errors import SnapshotCorrupt
from nsm_core.hashing import checksum
from service.stores.sessions.base import LogMark, SessionHead
from service.stores.sessions.records import TOKEN_BYTES, already_exists, decode_ids, encode_ids, not_found

HEAD_COLUMNS = (
    "tenant, session_id, version, position, created_at, updated_at, model_fingerprint, metadata, num_log_tokens, "
    "snapshot_bytes, ttl_s, expires_at, forked_from"
)
ONE = "tenant = ? AND session_id = ?"
EXISTS = "(expires_at IS NULL OR max(expires_at, lease_expires_at) > ?)"  # at a time


def head_of(row: tuple[Any, ...]) -> SessionHead:
    """A row of HEAD_COLUMNS, which are in the dataclass's order."""
    names = HEAD_COLUMNS.split(", ")
    fields = dict(zip(names, row, strict=True))
    fields["metadata"] = MappingProxyType(json.loads(fields["metadata"]))
    return SessionHead(**fields)


def get_head(connection: sqlite3.Connection, tenant: str, session_id: str, now: float) -> SessionHead:
    """Raises NotFound."""
    query = f"SELECT {HEAD_COLUMNS} FROM sessions WHERE {ONE} AND {EXISTS}"
    row = connection.execute(query, (tenant, session_id, now)).fetchone()
    if row is None:
        raise not_found(session_id)
    return head_of(row)


def insert_head(connection: sqlite3.Connection, head: SessionHead) -> None:
    """A new session; takes the place of one that expired. Raises VersionConflict when the id exists."""
    key = (head.tenant, head.session_id)
    connection.execute(f"DELETE FROM sessions WHERE {ONE} AND NOT {EXISTS}", (*key, head.created_at))
    if connection.execute(f"SELECT 1 FROM sessions WHERE {ONE}", key).fetchone() is not None:
        raise already_exists(head.session_id)
    names = HEAD_COLUMNS.split(", ")
    values = [json.dumps(dict(head.metadata)) if name == "metadata" else getattr(head, name) for name in names]
    places = ", ".join("?" * len(names))
    connection.execute(f"INSERT INTO sessions ({HEAD_COLUMNS}) VALUES ({places})", values)


def get_snapshot(connection: sqlite3.Connection, head: SessionHead) -> bytes | None:
    query = f"SELECT snapshot FROM snapshots WHERE {ONE} AND version = ?"
    row = connection.execute(query, (head.tenant, head.session_id, head.version)).fetchone()
    return None if row is None else bytes(row[0])


def replace_snapshot(
    connection: sqlite3.Connection, head: SessionHead, *, version: int, snapshot: bytes | None
) -> None:
    """The old one goes first: the new one then takes its pages, and they are written once."""
    key = (head.tenant, head.session_id)
    connection.execute(f"DELETE FROM snapshots WHERE {ONE}", key)
    if snapshot is not None:
        connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", (*key, version, snapshot))


def append_chunk(
    connection: sqlite3.Connection,
    head: SessionHead,
    ids: tuple[int, ...],
    *,
    version: int,
    num_sampled: int,
    seed: int | None,
) -> None:
    """What `version` added to the log."""
    raw, seed_text = encode_ids(ids), None if seed is None else str(seed)
    connection.execute(
        "INSERT INTO log_chunks (tenant, session_id, version, ids, num_sampled, seed, checksum) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (head.tenant, head.session_id, version, raw, num_sampled, seed_text, checksum(raw)),
    )


def append_log(
    connection: sqlite3.Connection, head: SessionHead, log_ids: tuple[int, ...], marks: Iterable[LogMark]
) -> None:
    """A whole log, cut into chunks at its marks."""
    start = 0
    for mark in marks:
        ids = log_ids[start : mark.num_log_tokens]
        append_chunk(connection, head, ids, version=mark.version, num_sampled=mark.num_sampled, seed=mark.seed)
        start = mark.num_log_tokens


def get_marks(connection: sqlite3.Connection, head: SessionHead) -> tuple[LogMark, ...]:
    query = f"SELECT version, length(ids), num_sampled, seed FROM log_chunks WHERE {ONE} ORDER BY version"
    rows = connection.execute(query, (head.tenant, head.session_id)).fetchall()
    ends = itertools.accumulate(num_bytes // TOKEN_BYTES for _, num_bytes, _, _ in rows)
    return tuple(
        LogMark(version=version, num_log_tokens=end, num_sampled=num_sampled, seed=None if seed is None else int(seed))
        for (version, _, num_sampled, seed), end in zip(rows, ends, strict=True)
    )


def get_log(connection: sqlite3.Connection, head: SessionHead) -> tuple[int, ...]:
    """Raises SnapshotCorrupt when it is not what was stored."""
    query = f"SELECT ids, checksum FROM log_chunks WHERE {ONE} ORDER BY version"
    rows = connection.execute(query, (head.tenant, head.session_id)).fetchall()
    if any(checksum(ids) != stored for ids, stored in rows):
        raise SnapshotCorrupt(f"the token log of session {head.session_id!r} fails its checksum")
    log = decode_ids(b"".join(ids for ids, _ in rows))
    if len(log) != head.num_log_tokens:
        raise SnapshotCorrupt(f"the log of session {head.session_id!r} has {len(log)} tokens of {head.num_log_tokens}")
    return log


def cut_log(
    connection: sqlite3.Connection,
    head: SessionHead,
    num_log_tokens: int,
    *,
    num_sampled: int,
    seed: int | None,
) -> int:
    """Drops the chunks beyond `num_log_tokens`; what is left of the first of them becomes the next version's.

    Returns the newest version that is left whole, 0 for none.
    """
    kept = [mark for mark in get_marks(connection, head) if mark.num_log_tokens <= num_log_tokens]
    last_version, start = (kept[-1].version, kept[-1].num_log_tokens) if kept else (0, 0)
    rest = get_log(connection, head)[start:num_log_tokens]
    statement = f"DELETE FROM log_chunks WHERE {ONE} AND version > ?"
    connection.execute(statement, (head.tenant, head.session_id, last_version))
    append_chunk(connection, head, rest, version=head.version + 1, num_sampled=num_sampled, seed=seed)
    return int(last_version)
