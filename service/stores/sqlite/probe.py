"""Whether the SQLite store has room for what turns commit: what readiness asks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from nsm_core.errors import StorageFull
from service.stores.sqlite.connection import Result, Runner, Work, transaction


class SqliteProbe:
    """Remembers the commit that found no room last; the probe then writes as much. `hold` hears of those that did."""

    def __init__(self, *, write: Runner, hold: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._hold = hold
        self._clock = clock
        self._refused_bytes = 0

    async def write_state(self, work: Work[Result], num_bytes: int) -> Result:
        """`work`, which stores snapshots of `num_bytes` in all. Raises StorageFull."""

        def held(connection: sqlite3.Connection) -> Result:
            done = work(connection)
            self._hold(num_bytes)
            return done

        try:
            return await self._write(held)
        except StorageFull:
            self._refused_bytes = num_bytes
            raise

    async def check_writable(self) -> None:
        num_bytes = self._refused_bytes

        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.execute("INSERT OR REPLACE INTO probe VALUES (1, zeroblob(?))", (num_bytes,))
                connection.execute("UPDATE probe SET written_at = ?", (self._clock(),))

        await self._write(work)
        self._refused_bytes = 0
