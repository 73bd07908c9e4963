"""Whether the files of an open SQLite database are still those at its path, with all that was acknowledged.

SQLite keeps its files open. When somebody unlinks, moves, replaces or overwrites them, it goes on in files that no
restart will find. So identity is compared before each call and again before a write is acknowledged, and each
transaction that a power cut cannot take back raises a number in the database, the stamp:

- the database file, read without its log, never has a lower stamp than before: else it is an older copy;
- a write-ahead log shrinks or begins anew only after all of it moved into the database file: else it was truncated;
- at the next start the database has the stamp that was acknowledged last, which a small file beside it remembers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from nsm_core.errors import StoreReplaced, StoreUnavailable

logger = logging.getLogger("nsm.store")

HEADER_BYTES = 32  # of the write-ahead log: its salts change whenever it begins anew
REREAD_WAITS_S = (0.0, 0.01, 0.05, 0.2)  # before each try to read a file that another process may be writing
MARK_BYTES = 8  # the acknowledged stamp, little endian


class FileWatch:
    """For one open store; all but `check` runs in the thread of the connection that writes.

    `num_lost_writes`: transactions that were acknowledged before this start and are not in the database.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = database.with_name(f"{database.name}-wal")
        self._index = database.with_name(f"{database.name}-shm")
        self._files = tuple(map(os.fspath, (database, self._log, self._index)))
        self._index_bytes = 0
        self._mark = database.with_name(f"{database.name}-stamp")
        self._identities: tuple[tuple[int, int] | None, ...] = ()
        self._mark_descriptor = -1
        self._log_descriptor = -1  # kept: a process without free descriptors must not see a log that is gone
        self._database_state = (0, 0)
        self._stamp_in_file = 0
        self._log_state = (0, b"")
        self._acknowledged = 0
        self._problem: str | None = None
        self.num_lost_writes = 0

    def begin(self, connection: sqlite3.Connection) -> None:
        """Once, on a database that is ready for use. Raises StoreUnavailable when its log cannot be opened."""
        try:
            self._log_descriptor = os.open(self._log, os.O_RDONLY)
        except OSError as error:
            raise StoreUnavailable(f"{self._log} cannot be opened ({error.strerror})") from error
        with contextlib.suppress(OSError):
            self._mark_descriptor = os.open(self._mark, os.O_CREAT | os.O_RDWR, 0o600)
        marked = self._read_mark()
        self._acknowledged = read_stamp(connection)
        self.num_lost_writes = max(0, marked - self._acknowledged)
        if self.num_lost_writes:
            logger.error(
                "%s lacks the last %d writes that were acknowledged: it, or its write-ahead log, was removed, cut or "
                "replaced by an older copy while no server ran",
                self._database,
                self.num_lost_writes,
            )
        self._write_mark()
        found = self._find()
        self._identities = tuple(map(_identity, found))
        self._log_state = self._find_log_state()
        self._check_stamp_in_file(found[0])

    def end(self) -> None:
        for descriptor in (self._mark_descriptor, self._log_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._mark_descriptor = self._log_descriptor = -1

    def check(self) -> None:
        """Raises StoreReplaced when another file, or none, is where one of the open ones was."""
        self._check()

    def _check(self) -> os.stat_result:
        """The same. Gives what the system says of the database file: to ask twice takes a tenth of a short write."""
        found = self._find()
        for path, opened, one in zip(self._files, self._identities, found, strict=False):
            if one is None:
                self._refuse(f"{path} was removed or moved")
            if _identity(one) != opened:
                self._refuse(f"{path} was replaced by another file")
        self._problem = None
        database, _, index = found
        if database is None or index is None:
            self._refuse(f"{self._database} or its index was removed or moved")
        self._repair_index(index.st_size)
        return database

    def check_before_write(self, connection: sqlite3.Connection) -> None:
        """`check`, and that the files' content did not go back. Raises StoreReplaced."""
        self._check_stamp_in_file(self._check())
        size, header = self._find_log_state()
        is_other = size < self._log_state[0] or header != self._log_state[1]
        if is_other and self._stamp_in_file < self._acknowledged and self._stays_below(self._acknowledged):
            self._refuse(f"{self._log} was cut or overwritten")
        self._log_state = (size, header)
        if read_stamp(connection) < self._acknowledged:
            self._refuse(f"{self._database} or its log was overwritten with an older copy")

    def acknowledge(self, connection: sqlite3.Connection) -> None:
        """After a transaction, before it is acknowledged. Raises StoreReplaced."""
        self.check()
        self._log_state = self._find_log_state()
        self._acknowledged = read_stamp(connection)
        self._write_mark()

    def _repair_index(self, num_bytes: int) -> None:
        """The index of the log is mapped into memory: a process that touches a part that was cut off is killed.

        Filled up with zeros it is not valid, and SQLite makes it again from the log.
        """
        try:
            if num_bytes < self._index_bytes:
                os.truncate(self._index, self._index_bytes)
                logger.error("%s was cut while the store is open; it is made again", self._index)
            else:
                self._index_bytes = num_bytes
        except OSError as error:
            self._refuse(f"{self._index} was cut and cannot be made again ({error.strerror})")

    def _refuse(self, problem: str) -> NoReturn:
        if problem != self._problem:
            self._problem = problem
            logger.error(
                "%s while the server runs; nothing is written until it is back or the server restarts", problem
            )
        error = StoreReplaced("the files of the session store were removed or replaced; nothing of this was kept")
        error.add_note(problem)
        raise error

    def _find(self) -> tuple[os.stat_result | None, ...]:
        return tuple(map(_stat, self._files))

    def _find_log_state(self) -> tuple[int, bytes]:
        return os.fstat(self._log_descriptor).st_size, os.pread(self._log_descriptor, HEADER_BYTES, 0)

    def _check_stamp_in_file(self, database: os.stat_result | None) -> None:
        """Raises StoreReplaced when the database file changed into something else than its own continuation."""
        state = (0, 0) if database is None else (database.st_mtime_ns, database.st_size)
        if state == self._database_state:
            return
        if state[1] == 0 < self._database_state[1]:  # SQLite would drop the log of an empty file at the next start
            self._refuse(f"{self._database} was cut")
        try:
            stamp = self._read_stamp_in_file()
        except sqlite3.Error as error:
            is_cut = state[1] < self._database_state[1]
            if is_cut or error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_NOTADB:
                self._refuse(f"{self._database} was cut or overwritten")
            return  # pages of the log are being moved into it, or could not all be moved: look again at the next write
        if stamp < self._stamp_in_file and self._stays_below(self._stamp_in_file):
            self._refuse(f"{self._database} was overwritten with an older copy")
        self._database_state, self._stamp_in_file = state, max(stamp, self._stamp_in_file)

    def _stays_below(self, stamp: int) -> bool:
        """Whether the database file has a lower stamp, read anew.

        Another process may have moved the log into the file since it was read last, or may be doing so now: then the
        file is read again.
        """
        for wait_s in REREAD_WAITS_S:
            time.sleep(wait_s)
            with contextlib.suppress(sqlite3.Error):
                found = self._read_stamp_in_file()
                if found >= stamp:
                    self._stamp_in_file = found
                    return False
        return True

    def _read_stamp_in_file(self) -> int:
        """The stamp without transactions that only the write-ahead log has. Raises sqlite3.Error."""
        # not `open`: a descriptor that is closed again would take SQLite's locks on the file with it
        uri = f"file:{quote(str(self._database.absolute()))}?immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            return read_stamp(connection) if _has_stamp(connection) else 0

    def _read_mark(self) -> int:
        with contextlib.suppress(OSError):
            raw = os.pread(self._mark_descriptor, MARK_BYTES, 0)
            return int.from_bytes(raw, "little") if len(raw) == MARK_BYTES else 0
        return 0

    def _write_mark(self) -> None:
        with contextlib.suppress(OSError):  # it only tells more at the next start
            os.pwrite(self._mark_descriptor, self._acknowledged.to_bytes(MARK_BYTES, "little"), 0)


def read_stamp(connection: sqlite3.Connection) -> int:
    """0 where somebody deleted it: less than any acknowledged stamp."""
    (stamp,) = connection.execute("SELECT coalesce(max(stamp), 0) FROM usage WHERE tenant = ''").fetchone()
    return int(stamp)


def _has_stamp(connection: sqlite3.Connection) -> bool:
    """Not at first: until the log's pages are moved for the first time, the file is empty, or of an older schema."""
    return connection.execute("SELECT 1 FROM pragma_table_info('usage') WHERE name = 'stamp'").fetchone() is not None


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _identity(found: os.stat_result | None) -> tuple[int, int] | None:
    return None if found is None else (found.st_dev, found.st_ino)
