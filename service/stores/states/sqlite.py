"""Named states in the session store's SQLite database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.connection import empty_write_ahead_log, reading, transaction
from service.stores.states.base import (
    PUBLISHED,
    NamedState,
    NewState,
    StoredState,
    name_is_published,
    new_of,
    published_last,
)
from service.stores.states.fields import decode_fields, encode_fields, num_bytes_of

# Above every version there is, too: the table of the newest ones may be damaged
NEXT = """
    INSERT INTO named_state_versions
    SELECT ?1, ?2, 1 + coalesce(max(version), 0) FROM named_states WHERE tenant = ?1 AND name = ?2
    ON CONFLICT DO UPDATE SET newest = max(newest + 1, excluded.newest) RETURNING newest
"""
INSERT = "INSERT INTO named_states VALUES (?, ?, ?, ?, ?, ?, ?)"
RAISE_NEWEST = (
    "INSERT INTO named_state_versions VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET newest = max(newest, excluded.newest)"
)
NEWEST = """
    SELECT max(newest) FROM (
        SELECT newest FROM named_state_versions WHERE tenant = ?1 AND name = ?2
        UNION ALL SELECT version FROM named_states WHERE tenant = ?1 AND name = ?2)
"""
TENANTS = "SELECT DISTINCT tenant FROM named_states"
FIND = (
    "SELECT version, fields FROM named_states WHERE tenant = ? AND name = ? AND coalesce(?, version) = version "
    "ORDER BY version DESC LIMIT 1"
)
LOAD = "SELECT fields, file, text FROM named_states WHERE tenant = ? AND name = ? AND version = ?"
LIST = "SELECT name, version, fields FROM named_states WHERE tenant = ? ORDER BY name, version DESC"
DELETE = "DELETE FROM named_states WHERE tenant = ? AND name = ? AND coalesce(?, version) = version"
VERSIONS = "SELECT version FROM named_states WHERE tenant = ? AND name = ? AND coalesce(?, version) = version"
USAGE = "SELECT coalesce(sum(num_bytes), 0) FROM named_states WHERE tenant = ?"


class SqliteStateStore:
    """The embedded StateStore."""

    def __init__(self, sessions: SqliteSessionStore, *, clock: Callable[[], float] = time.time) -> None:
        self._database = sessions.database
        self._clock = clock

    async def add(self, *, tenant: str, name: str, state: NewState) -> NamedState:
        fields = encode_fields(state, created_at=self._clock())

        def work(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                _require_own_name(connection, tenant, name)
                (version,) = connection.execute(NEXT, (tenant, name)).fetchone()
                row = (tenant, name, version, fields, num_bytes_of(state), state.file, state.text)
                connection.execute(INSERT, row)
            return int(version)

        return decode_fields(tenant, name, await self._database.write_new(work), fields)

    async def restore(self, stored: StoredState, *, newest: int) -> bool:
        head, state = stored.head, new_of(stored)
        key = (head.tenant, head.name)
        fields = encode_fields(state, created_at=head.created_at)

        def work(connection: sqlite3.Connection) -> bool:
            with transaction(connection):
                if connection.execute(FIND, (*key, head.version)).fetchone() is not None:
                    return False
                _require_own_name(connection, *key)
                row = (*key, head.version, fields, num_bytes_of(state), state.file, state.text)
                connection.execute(INSERT, row)
                connection.execute(RAISE_NEWEST, (*key, max(newest, head.version)))
            return True

        return await self._database.write_new(work)

    async def newest_version(self, *, tenant: str, name: str) -> int:
        (newest,) = await self._database.read(lambda connection: connection.execute(NEWEST, (tenant, name)).fetchone())
        return int(newest or 0)

    async def list_tenants(self) -> tuple[str, ...]:
        rows = await self._database.read(lambda connection: connection.execute(TENANTS).fetchall())
        return published_last(tenant for (tenant,) in rows)

    async def get(self, *, tenant: str, name: str, version: int | None = None) -> NamedState | None:
        row = await self._database.read(lambda connection: connection.execute(FIND, (tenant, name, version)).fetchone())
        return None if row is None else decode_fields(tenant, name, *row)

    async def load(self, *, tenant: str, name: str, version: int) -> StoredState | None:
        row = await self._database.read(lambda connection: connection.execute(LOAD, (tenant, name, version)).fetchone())
        if row is None:
            return None
        fields, file, text = row
        return StoredState(head=decode_fields(tenant, name, version, fields), file=file, text=text)

    async def list(self, *, tenant: str) -> tuple[NamedState, ...]:
        def work(connection: sqlite3.Connection) -> list[tuple[str, int, str]]:
            with reading(connection):
                return connection.execute(LIST, (tenant,)).fetchall()

        return tuple(decode_fields(tenant, *row) for row in await self._database.read(work))

    async def delete(self, *, tenant: str, name: str, version: int | None = None) -> int:
        def work(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                num_deleted = connection.execute(DELETE, (tenant, name, version)).rowcount
            if num_deleted:
                empty_write_ahead_log(connection)
            return num_deleted

        def one_by_one(connection: sqlite3.Connection) -> int:
            num_deleted = 0
            for (one,) in connection.execute(VERSIONS, (tenant, name, version)).fetchall():
                with transaction(connection):
                    num_deleted += connection.execute(DELETE, (tenant, name, one)).rowcount
                empty_write_ahead_log(connection)  # deletion overwrites by way of it: it stays small so
            return num_deleted

        return await self._database.write(work, when_full=one_by_one)

    async def usage(self, *, tenant: str) -> int:
        return int(await self._database.read(lambda connection: connection.execute(USAGE, (tenant,)).fetchone()[0]))


def _require_own_name(connection: sqlite3.Connection, tenant: str, name: str) -> None:
    """Raises VersionConflict. Within a transaction."""
    if tenant != PUBLISHED and not _has(connection, tenant, name) and _has(connection, PUBLISHED, name):
        raise name_is_published(name)


def _has(connection: sqlite3.Connection, tenant: str, name: str) -> bool:
    return connection.execute(FIND, (tenant, name, None)).fetchone() is not None
