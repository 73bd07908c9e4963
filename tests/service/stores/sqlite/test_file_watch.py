"""What another process does to the files of a shared database is not taken for damage; damage is."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from nsm_core.errors import StoreReplaced
from service.stores.sqlite.database import FileDatabase
from service.stores.sqlite.file_watch import FileWatch
from tests.support.stored_sessions import opened


def count_write(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE usage SET stamp = stamp + 1 WHERE tenant = ''")


def empty_log(path: Path) -> None:
    """As another process does that moves the log into the database and begins it anew."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        count_write(other)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


async def test_X5_a_log_that_another_process_began_anew_during_the_check_is_no_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = FileWatch._find_log_state
    async with opened(FileDatabase(path, max_bytes=None, busy_timeout_s=5.0)) as database:
        for _ in range(3):
            await database.write(count_write)

            def find_late(watch: FileWatch) -> tuple[int, bytes]:
                monkeypatch.setattr(FileWatch, "_find_log_state", find)
                empty_log(path)
                return find(watch)

            monkeypatch.setattr(FileWatch, "_find_log_state", find_late)
            await database.write(count_write)


async def test_X5_a_database_file_that_is_being_written_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileWatch._read_stamp_in_file
    unreadable = iter([True, True])

    def read_late(watch: FileWatch) -> int:
        if next(unreadable, False):
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        return read(watch)

    async with opened(FileDatabase(path, max_bytes=None, busy_timeout_s=5.0)) as database:
        await database.write(count_write)
        empty_log(path)
        monkeypatch.setattr(FileWatch, "_read_stamp_in_file", read_late)
        await database.write(count_write)


async def test_X5_a_log_that_was_cut_is_refused(path: Path) -> None:
    async with opened(FileDatabase(path, max_bytes=None, busy_timeout_s=5.0)) as database:
        await database.write(count_write)
        log = path.with_name(f"{path.name}-wal")
        with log.open("r+b") as file:
            file.truncate(0)
        with pytest.raises(StoreReplaced):
            await database.write(count_write)
