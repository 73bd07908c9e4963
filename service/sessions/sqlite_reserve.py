"""Room on the disk kept aside by the SQLite store, so that sessions can be deleted when there is no other room left.

To delete, SQLite must write: what the write-ahead log still holds moves into the database, and what is deleted is
overwritten, by way of the log. Without a reserve a full disk would stay full.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from service.sessions.sqlite_connection import Result, empty_write_ahead_log, is_full

# The log before a checkpoint (sqlite_schema.CHECKPOINT_PAGES) and the largest commit of a usual state behind it.
RESERVE_BYTES = 8 * 1024 * 1024


class Reserve:
    """A file beside the database that does nothing but take up room. Taking it and giving it up never raises.

    Processes that share the database share it.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-reserve")

    def fill(self) -> None:
        """Take the room, or half of what is free when that is less: the log cannot outgrow the other half."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                _allocate(descriptor)
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

    def give_up(self) -> None:
        """Free the room until the next `fill`."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _allocate(descriptor: int) -> None:
    """Raises OSError when the file system has no room or cannot reserve any; then the file is as it was, or empty."""
    has = os.fstat(descriptor).st_size
    disk = os.fstatvfs(descriptor)
    wanted = min(RESERVE_BYTES, (disk.f_bavail * disk.f_frsize + has) // 2)
    if wanted <= has:
        return
    try:
        os.posix_fallocate(descriptor, 0, wanted)
    except OSError:
        os.truncate(descriptor, 0)
        raise
