"""What a SQLite store holds, read and changed behind its back, as damage and other processes would."""

from __future__ import annotations

from typing import Any

from nsm_core.hashing import checksum
from service.stores.sessions.base import SessionStore
from service.stores.sessions.codec import encode_ids
from service.stores.sessions.sqlite import SqliteSessionStore

ONE = "tenant = ? AND session_id = ?"
LOG_OF_ONE = f"row_id >> 32 = (SELECT number FROM sessions WHERE {ONE})"  # of log_chunks
VERSION = "(row_id & 4294967295)"


async def execute(store: SessionStore, statement: str, *values: Any) -> list[Any]:
    """The rows of one statement."""
    assert isinstance(store, SqliteSessionStore)
    return await store.database.read(lambda connection: connection.execute(statement, values).fetchall())


async def get_snapshot(store: SessionStore, session_id: str = "s1", *, tenant: str = "default") -> bytes:
    query = f"SELECT snapshot FROM snapshots WHERE {ONE} ORDER BY version DESC LIMIT 1"
    ((raw,),) = await execute(store, query, tenant, session_id)
    return bytes(raw)


async def put_snapshot(
    store: SessionStore, raw: bytes | None, session_id: str = "s1", *, tenant: str = "default"
) -> None:
    """In the place of the newest snapshot; None: it is lost."""
    if raw is None:
        newest = f"(SELECT snapshot_version FROM sessions WHERE {ONE})"
        values = (tenant, session_id, tenant, session_id)
        await execute(store, f"DELETE FROM snapshots WHERE {ONE} AND version = {newest}", *values)
        return
    await execute(
        store,
        "INSERT OR REPLACE INTO snapshots "
        f"SELECT tenant, session_id, snapshot_version, ? FROM sessions WHERE {ONE}",
        raw, tenant, session_id,
    )  # fmt: skip


async def damage_snapshot(store: SessionStore, session_id: str = "s1", *, tenant: str = "default") -> None:
    raw = await get_snapshot(store, session_id, tenant=tenant)
    await put_snapshot(store, raw[:-1] + bytes([raw[-1] ^ 1]), session_id, tenant=tenant)


async def get_retained(store: SessionStore, session_id: str = "s1") -> dict[int, bytes]:
    """By version."""
    query = (
        f"SELECT version, snapshot FROM older_snapshots JOIN snapshots USING (tenant, session_id, version) WHERE {ONE}"
    )
    return {version: bytes(raw) for version, raw in await execute(store, query, "default", session_id)}


async def put_retained(store: SessionStore, version: int, raw: bytes, session_id: str = "s1") -> None:
    statement = f"UPDATE snapshots SET snapshot = ? WHERE {ONE} AND version = ?"
    await execute(store, statement, raw, "default", session_id, version)


async def get_chunk(store: SessionStore, session_id: str = "s1", *, tenant: str = "default") -> tuple[int, bytes]:
    """Version and bytes of the newest chunk of the token log."""
    query = f"SELECT {VERSION}, ids FROM log_chunks WHERE {LOG_OF_ONE} ORDER BY row_id DESC LIMIT 1"
    ((version, ids),) = await execute(store, query, tenant, session_id)
    return int(version), bytes(ids)


async def put_chunk(
    store: SessionStore, version: int, ids: tuple[int, ...] | bytes, session_id: str = "s1", *, tenant: str = "default"
) -> None:
    """With a checksum that fits."""
    raw = ids if isinstance(ids, bytes) else encode_ids(ids)
    statement = f"UPDATE log_chunks SET ids = ?, checksum = ? WHERE {LOG_OF_ONE} AND {VERSION} = ?"
    await execute(store, statement, raw, checksum(raw), tenant, session_id, version)


async def lease_holder(store: SessionStore) -> str | None:
    query = f"SELECT lease_holder FROM sessions WHERE {ONE}"
    ((holder,),) = await execute(store, query, "default", "s1")
    return None if holder is None else str(holder)


async def steal_lease(store: SessionStore, holder: str) -> None:
    """As if another process had taken the lease after it expired, for a minute."""
    taken = "fence = fence + 1, lease_holder = ?, lease_expires_at = lease_expires_at + 60"
    statement = f"UPDATE sessions SET {taken} WHERE {ONE}"
    await execute(store, statement, holder, "default", "s1")


async def expire_lease(store: SessionStore) -> None:
    await execute(store, f"UPDATE sessions SET lease_expires_at = 0 WHERE {ONE}", "default", "s1")
