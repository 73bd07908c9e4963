"""Room on the disk kept aside by the SQLite store, so that on a full disk sessions can be deleted, and go on.

To delete, SQLite must write: what the write-ahead log still holds moves into the database, and what is deleted is
overwritten, by way of the log. A turn overwrites too, its session's last state. Neither makes the database grow much,
so the room that they borrow comes back when the log is emptied; without a reserve a full disk would stay full.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from service.stores.sqlite.connection import Result, empty_write_ahead_log, is_full
from service.stores.sqlite.schema import PAGE_BYTES

# The largest commit of a usual state, with an older one that is kept beside it; `hold` for larger ones.
RESERVE_BYTES = 8 * 1024 * 1024
LEFT_BYTES = 256 * 1024  # what others in the directory write, and the file system's own notes


class Reserve:
    """A file beside the database that does nothing but take up room. Taking it and giving it up never raises.

    Processes that share the database share it.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._bytes = RESERVE_BYTES
        self._path = database.with_name(f"{database.name}-reserve")

    def hold(self, commit_bytes: int) -> None:
        """Enough for a commit, or the deletion, of snapshots of `commit_bytes`: an eighth more, for what is beside."""
        if commit_bytes + commit_bytes // 8 > self._bytes:
            self._bytes = commit_bytes + commit_bytes // 8
            self.fill()

    def fill(self) -> None:
        """Take the room, or as much of it as there is.

        At most half of what the disk has for database and reserve together, whatever the database holds of it: a share
        of what is free would be less with every time it is taken again.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                _allocate(descriptor, self._bytes, database_bytes=self._database.stat().st_size)
            finally:
                os.close(descriptor)

    def lent_to(self, work: Callable[[sqlite3.Connection], Result]) -> Callable[[sqlite3.Connection], Result]:
        """`work`, which makes room, and may need some for that: on a full disk it runs again without the reserve."""

        def guarded(connection: sqlite3.Connection) -> Result:
            try:
                return work(connection)
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self.give_up()
                empty_write_ahead_log(connection)
                return work(connection)
            finally:
                self.fill()

        return guarded

    def behind(self, work: Callable[[sqlite3.Connection], Result]) -> Callable[[sqlite3.Connection], Result]:
        """`work`, which adds to what is stored. On a full disk again: with an empty log, and in the reserve."""

        def guarded(connection: sqlite3.Connection) -> Result:
            try:
                return work(connection)
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
            self._empty_log(connection)
            return self._borrow(connection, work)

        return guarded

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        """SQLite does so after a commit only: a log that leaves no room for one would stay as it is for good.

        Its new pages make the database grow before the log shrinks; the reserve holds them until then.
        """
        self.give_up()
        try:
            empty_write_ahead_log(connection)
        finally:
            self.fill()

    def _borrow(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The log may be as large as the reserve and what is free beside it; the database grows by the latter only."""
        num_free_bytes = _num_free_bytes(self._database)
        self.give_up()
        try:
            with _growing_at_most(connection, num_free_bytes):
                return work(connection)
        finally:
            empty_write_ahead_log(connection)
            self.fill()

    def give_up(self) -> None:
        """Free the room until the next `fill`."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def _growing_at_most(connection: sqlite3.Connection, num_bytes: int) -> Iterator[None]:
    """Inside, a database that would grow by more fails as on a full disk."""
    (limit,) = connection.execute("PRAGMA max_page_count").fetchone()
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {min(limit, num_pages + num_bytes // PAGE_BYTES)}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA max_page_count = {limit}")


def _num_free_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def _allocate(descriptor: int, num_bytes: int, *, database_bytes: int) -> None:
    """Raises OSError when the file system has no room or cannot reserve any; then the file is as it was, or empty."""
    has = os.fstat(descriptor).st_size
    disk = os.fstatvfs(descriptor)
    available = disk.f_bavail * disk.f_frsize + has
    wanted = min(num_bytes, (available + database_bytes) // 2, available - LEFT_BYTES)
    if wanted <= has:
        return
    try:
        os.posix_fallocate(descriptor, 0, wanted)
    except OSError:
        os.truncate(descriptor, 0)
        raise
