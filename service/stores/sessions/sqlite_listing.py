"""What there is in the SQLite store: pages of sessions, tenants, and what they take."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from service.stores.sessions.base import SessionPage, TenantUsage
from service.stores.sessions.records import decode_cursor, encode_cursor
from service.stores.sessions.sqlite_rows import EXISTS, HEAD_COLUMNS, head_of
from service.stores.sqlite.connection import Runner


class SqliteListing:
    """The calls of a SessionStore that look at more than one session."""

    def __init__(self, *, read: Runner, clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock

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

        return await self._read(work)

    async def list_tenants(self) -> tuple[str, ...]:
        def work(connection: sqlite3.Connection) -> tuple[str, ...]:
            rows = connection.execute("SELECT tenant FROM usage WHERE num_sessions > 0 ORDER BY tenant").fetchall()
            return tuple(tenant for (tenant,) in rows)

        return await self._read(work)

    async def usage(self, *, tenant: str) -> TenantUsage:
        def work(connection: sqlite3.Connection) -> TenantUsage:
            row = connection.execute("SELECT num_sessions, num_bytes FROM usage WHERE tenant = ?", (tenant,)).fetchone()
            num_sessions, num_bytes = row or (0, 0)
            return TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)

        return await self._read(work)
