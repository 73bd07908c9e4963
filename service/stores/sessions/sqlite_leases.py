"""Leases in the SQLite store. All of it runs inside a caller's transaction."""

from __future__ import annotations

import dataclasses
import sqlite3

from service.stores.sessions.base import Lease, SessionHead
from service.stores.sessions.records import expiry, lease_lost, require_version, session_busy
from service.stores.sessions.sqlite_rows import EXISTS, ONE, get_head
from service.stores.sqlite.presence import Presence

_FREE = "lease_holder = NULL, lease_owner = NULL, lease_expires_at = 0"
_HELD = f"{ONE} AND created_at = ? AND lease_holder = ? AND fence = ?"  # the newest lease, of this incarnation


def take(
    connection: sqlite3.Connection, head: SessionHead, *, holder: str, now: float, lease_s: float, presence: Presence
) -> Lease:
    """Raises SessionBusy while another lease lives and the store that took it is open."""
    key = (head.tenant, head.session_id)
    query = f"SELECT fence, lease_holder, lease_owner, lease_expires_at FROM sessions WHERE {ONE}"
    fence, old_holder, old_owner, old_expires_at = connection.execute(query, key).fetchone()
    if old_holder is not None and old_expires_at > now and not presence.is_gone(old_owner):
        raise session_busy(head.session_id, old_expires_at - now)
    connection.execute(
        f"UPDATE sessions SET fence = ?, lease_holder = ?, lease_owner = ?, lease_expires_at = ? WHERE {ONE}",
        (fence + 1, holder, presence.name, now + lease_s, *key),
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
    connection.execute(f"UPDATE sessions SET {_FREE} WHERE {ONE}", (head.tenant, head.session_id))


def lease_left_s(connection: sqlite3.Connection, key: tuple[str, str], *, now: float, presence: Presence) -> float:
    """How long the session's lease still holds; 0 when nobody has it, or whoever had it is gone."""
    query = f"SELECT lease_holder, lease_owner, lease_expires_at FROM sessions WHERE {ONE}"
    holder, owner, expires_at = connection.execute(query, key).fetchone()
    if holder is None or expires_at <= now or presence.is_gone(owner):
        return 0.0
    return float(expires_at - now)


def held_head(connection: sqlite3.Connection, lease: Lease, now: float) -> SessionHead:
    """The head of the session that `lease` holds. Raises NotFound or LeaseLost."""
    head = get_head(connection, lease.tenant, lease.session_id, now)
    if connection.execute(f"SELECT 1 FROM sessions WHERE {_HELD}", _names(lease)).fetchone() is None:
        raise lease_lost(lease)
    return head


def writable_head(connection: sqlite3.Connection, lease: Lease, expected_version: int, now: float) -> SessionHead:
    """The head that `lease` may move on. Raises NotFound, LeaseLost or VersionConflict."""
    head = held_head(connection, lease, now)
    require_version(head, expected_version)
    return head


def move_head(
    connection: sqlite3.Connection,
    head: SessionHead,
    *,
    now: float,
    position: int,
    model_fingerprint: str,
    num_log_tokens: int,
    snapshot: bytes | None,
) -> SessionHead:
    """To the next version; the session is free again."""
    moved = dataclasses.replace(
        head,
        version=head.version + 1,
        position=position,
        updated_at=now,
        model_fingerprint=model_fingerprint,
        num_log_tokens=num_log_tokens,
        snapshot_bytes=len(snapshot or b""),
        expires_at=expiry(now, head.ttl_s),
    )
    connection.execute(
        "UPDATE sessions SET version = ?, position = ?, updated_at = ?, model_fingerprint = ?, num_log_tokens = ?, "
        f"snapshot_bytes = ?, expires_at = ?, {_FREE} WHERE {ONE}",
        (moved.version, position, now, model_fingerprint, num_log_tokens, moved.snapshot_bytes, moved.expires_at,
         head.tenant, head.session_id),
    )  # fmt: skip
    return moved


def _names(lease: Lease) -> tuple[str, str, float, str, int]:
    """The parameters of _HELD."""
    return (lease.tenant, lease.session_id, lease.created_at, lease.holder, lease.fence)
