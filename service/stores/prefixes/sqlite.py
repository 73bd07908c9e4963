"""Prefixes in a SQLite file of their own, beside the sessions': they survive a restart, and processes may share them.

One thread writes, another reads: a lookup does not wait until another entry is written.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from nsm_core.errors import StorageFull, StoreUnavailable
from service.stores.prefixes.base import PrefixBounds, PrefixKey, PrefixUsage
from service.stores.prefixes.sqlite_file import file_thread, prepare_file
from service.stores.sqlite.connection import ConnectionThread, Result

MIN_FREE_BYTES = 256 * 2**20  # of the disk: sessions may need them, a cache may not have them

ONE = "tenant = ? AND family = ? AND position = ? AND digest = ?"
OF_A_TENANT = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM prefixes WHERE tenant = ?"
LARGEST = "SELECT tenant, sum(num_bytes) AS size FROM prefixes GROUP BY tenant ORDER BY size DESC, tenant DESC"
DROP_OLDEST = """
    DELETE FROM prefixes WHERE id =
        (SELECT id FROM prefixes WHERE tenant = ? ORDER BY used_at, id LIMIT 1)
"""


class SqlitePrefixStore:
    """The embedded PrefixStore. Nothing is put while the disk has less than `min_free_bytes` free: StorageFull."""

    def __init__(
        self,
        path: Path,
        bounds: PrefixBounds,
        *,
        clock: Callable[[], float] = time.time,
        min_free_bytes: int = MIN_FREE_BYTES,
    ) -> None:
        self._path = path
        self._bounds = bounds
        self._clock = clock
        self._min_free_bytes = min_free_bytes
        self._threads: tuple[ConnectionThread, ConnectionThread] | None = None  # the reader, the writer

    async def open(self) -> None:
        await asyncio.to_thread(prepare_file, self._path)
        self._threads = file_thread(self._path), file_thread(self._path)

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        for thread in threads or ():
            await thread.close()

    async def find(self, *, tenant: str, family: str) -> tuple[PrefixKey, ...]:
        place = (tenant, family, self._clock() - self._bounds.ttl_s)
        query = "SELECT position, digest FROM prefixes WHERE tenant = ? AND family = ? AND used_at > ?"
        rows = await self._read(lambda connection: connection.execute(query, place).fetchall())
        return tuple(PrefixKey(family=family, position=position, digest=digest) for position, digest in rows)

    async def load(self, *, tenant: str, key: PrefixKey) -> bytes | None:
        place = (*_place(tenant, key), self._clock() - self._bounds.ttl_s)
        query = f"SELECT entry FROM prefixes JOIN entries USING (id) WHERE {ONE} AND used_at > ?"
        row = await self._read(lambda connection: connection.execute(query, place).fetchone())
        if row is None:
            return None
        used = (self._clock(), *_place(tenant, key))
        self._opened()[1].post(
            lambda connection: connection.execute(f"UPDATE prefixes SET used_at = ? WHERE {ONE}", used)
        )
        return bytes(row[0])

    async def put(self, *, tenant: str, key: PrefixKey, entry: bytes) -> None:
        bounds = self._bounds
        if len(entry) > min(bounds.max_bytes, bounds.max_tenant_bytes):
            return
        if await asyncio.to_thread(self._free_bytes) < self._min_free_bytes:
            raise StorageFull("the disk of the stored prefixes has too little room")
        await self._write(lambda connection: self._put(connection, tenant, key, entry))

    def _put(self, connection: sqlite3.Connection, tenant: str, key: PrefixKey, entry: bytes) -> None:
        connection.execute(f"DELETE FROM prefixes WHERE {ONE}", _place(tenant, key))
        columns = "tenant, family, position, digest, num_bytes, used_at"
        row = (*_place(tenant, key), len(entry), self._clock())
        added = connection.execute(f"INSERT INTO prefixes ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO entries VALUES (?, ?)", (added.lastrowid, entry))
        while connection.execute(OF_A_TENANT, (tenant,)).fetchone()[1] > self._bounds.max_tenant_bytes:
            connection.execute(DROP_OLDEST, (tenant,))
        while True:
            sizes = connection.execute(LARGEST).fetchall()
            if sum(size for _, size in sizes) <= self._bounds.max_bytes:
                return
            connection.execute(DROP_OLDEST, (sizes[0][0],))

    async def remove(self, *, tenant: str, key: PrefixKey) -> None:
        place = _place(tenant, key)
        await self._write(lambda connection: connection.execute(f"DELETE FROM prefixes WHERE {ONE}", place))

    async def usage(self, *, tenant: str) -> PrefixUsage:
        num_entries, num_bytes = await self._read(
            lambda connection: connection.execute(OF_A_TENANT, (tenant,)).fetchone()
        )
        return PrefixUsage(num_entries=num_entries, num_bytes=num_bytes)

    async def remove_expired(self) -> int:
        oldest = self._clock() - self._bounds.ttl_s
        query = "DELETE FROM prefixes WHERE used_at <= ?"
        return await self._write(lambda connection: connection.execute(query, (oldest,)).rowcount)

    async def _read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._opened()[0].run(work)

    async def _write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._opened()[1].run(lambda connection: whole(connection, work))

    def _opened(self) -> tuple[ConnectionThread, ConnectionThread]:
        if self._threads is None:
            raise StoreUnavailable("the stored prefixes are not open")
        return self._threads

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._path.parent).free
        except OSError as error:
            raise StoreUnavailable(f"the stored prefixes are gone ({error.strerror})") from error


def whole(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]) -> Result:
    """`work` in one transaction: all or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself after some errors, a full disk among them
            connection.execute("ROLLBACK")
        raise
    return result


def _place(tenant: str, key: PrefixKey) -> tuple[str, str, int, str]:
    return (tenant, key.family, key.position, key.digest)
