"""A fixed file beside the database that takes up room, so that a full disk does not stop the sessions it holds.

To delete, SQLite must write: pages of its write-ahead log move into the database, and deleted pages are overwritten by
way of the log. A turn overwrites its session's last state in the same way. Neither makes the database grow much, so the
room comes back when the log is emptied. Without a ballast a full disk would stay full.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from nsm_core.errors import StorageFull
from service.stores.sqlite.connection import FULL, Result, empty_write_ahead_log, is_full
from service.stores.sqlite.schema import page_bytes

BALLAST_BYTES = 8 * 1024 * 1024  # the log of the largest commit of a usual state, 4 MB, and of the pages it replaces
SLACK_BYTES = 256 * 1024  # of it, for what sessions add on a full disk: tokens, turn records
STATE_BYTES = 4 * 1024 * 1024  # free pages inside the database that a new session needs on a full disk

Work = Callable[[sqlite3.Connection], Result]


class Ballast:
    """Processes that share the database share its ballast. Making and releasing it never raise."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = database.with_name(f"{database.name}-ballast")

    def make(self) -> bool:
        """Take the room, or as much of it as there is. Returns whether all but the slack is held now."""
        try:
            if self._path.stat().st_size >= BALLAST_BYTES:
                return True
        except OSError:
            pass  # not made yet, or somebody removed it
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return False
        try:
            return _allocate(descriptor) >= BALLAST_BYTES - SLACK_BYTES
        finally:
            os.close(descriptor)

    def has_room(self) -> bool:
        """Whether releasing it would free any."""
        try:
            return self._path.stat().st_blocks > 0
        except OSError:
            return False

    def release(self) -> None:
        """Free the room until the next `make`."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside its room is free. A ballast that was there is made again: the next start may find a full disk."""
        was_there = self._path.exists()
        self.release()
        try:
            yield
        finally:
            if was_there:
                self.make()

    def guard(self, work: Work[Result], *, when_full: Work[Result] | None = None) -> Work[Result]:
        """`work`, which continues or deletes what exists: on a full disk it runs again in the room of the ballast.

        `when_full`: what runs there in its place, such as the same in smaller transactions.
        """

        def run_when_full(connection: sqlite3.Connection) -> Result:
            return self._run_in_ballast(connection, when_full or work, slack_bytes=SLACK_BYTES)

        return self._guarded(work, run_when_full)

    def guard_new(self, work: Work[Result]) -> Work[Result]:
        """`work`, which adds a session. On a full disk it needs free pages in the database, or raises StorageFull."""

        def run_when_full(connection: sqlite3.Connection) -> Result:
            (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
            if num_free * page_bytes(connection) < STATE_BYTES:
                raise self._full(num_free)
            return self._run_in_ballast(connection, work, slack_bytes=0)

        return self._guarded(work, run_when_full)

    def _full(self, num_free: int) -> StorageFull:
        error = StorageFull(FULL)
        error.add_note(f"{self._database}: {num_free} free pages in the database")  # for the operator
        return error

    def _guarded(self, work: Work[Result], run_when_full: Work[Result]) -> Work[Result]:
        """`work`; `run_when_full` where the disk is full, for it or for the ballast."""

        def guarded(connection: sqlite3.Connection) -> Result:
            if self.make():
                try:
                    return work(connection)
                except sqlite3.Error as error:
                    if not is_full(error):
                        raise
            return run_when_full(connection)

        return guarded

    def _run_in_ballast(self, connection: sqlite3.Connection, work: Work[Result], *, slack_bytes: int) -> Result:
        self.release()
        empty_write_ahead_log(connection)
        try:
            with _growing_at_most(connection, _num_free_bytes(self._database) - BALLAST_BYTES + slack_bytes):
                return work(connection)
        finally:
            empty_write_ahead_log(connection)
            self.make()


def _allocate(descriptor: int) -> int:
    """The bytes that the file has now; a file system that cannot reserve any leaves it as it was, or empty."""
    has, disk = os.fstat(descriptor).st_size, os.fstatvfs(descriptor)
    wanted = min(BALLAST_BYTES, has + disk.f_bavail * disk.f_frsize)
    if wanted <= has:
        return has
    try:
        os.posix_fallocate(descriptor, 0, wanted)
    except OSError:
        os.truncate(descriptor, 0)
        return 0
    return wanted


@contextlib.contextmanager
def _growing_at_most(connection: sqlite3.Connection, num_bytes: int) -> Iterator[None]:
    """Inside, a database that would grow by more fails as on a full disk."""
    (limit,) = connection.execute("PRAGMA max_page_count").fetchone()
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    num_more = max(0, num_bytes) // page_bytes(connection)
    connection.execute(f"PRAGMA max_page_count = {min(limit, num_pages + num_more)}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA max_page_count = {limit}")


def _num_free_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize
