"""Named states in the session store's SQLite database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.connection import empty_write_ahead_log, reading, transaction
from service.stores.states.base import PUBLISHED, NamedState, NewState, StoredState, name_is_published
from service.stores.states.fields import decode_fields, encode_fields, num_bytes_of

# Above every version there is, too: the table of the newest ones may be damaged
NEXT = """
    INSERT INTO named_state_versions
    SELECT ?1, ?2, 1 + coalesce(max(version), 0) FROM named_states WHERE tenant = ?1 AND name = ?2
    ON CONFLICT DO UPDATE SET newest = max(newest + 1, excluded.newest) RETURNING newest
"""
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
                if tenant != PUBLISHED and not _has(connection, tenant, name) and _has(connection, PUBLISHED, name):
                    raise name_is_published(name)
                (version,) = connection.execute(NEXT, (tenant, name)).fetchone()
                row = (tenant, name, version, fields, num_bytes_of(state), state.file, state.text)
                connection.execute("INSERT INTO named_states VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return int(version)

        return decode_fields(tenant, name, await self._database.write_new(work), fields)

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


def _has(connection: sqlite3.Connection, tenant: str, name: str) -> bool:
    return connection.execute(FIND, (tenant, name, None)).fetchone() is not None
