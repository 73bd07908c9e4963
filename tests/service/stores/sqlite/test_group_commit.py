"""Short writes that wait at the same time share a transaction, and each is kept or not by itself."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import NotFound, NsmError, StorageFull, StoreReplaced, StoreUnavailable, VersionConflict
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.connection import transaction, unsynced_transaction
from service.stores.sqlite.database import FileDatabase
from service.stores.sqlite.group_commit import MAX_WRITES
from tests.support import stored_sessions
from tests.support.stored_sessions import opened

FULL, NORMAL = 2, 1  # of PRAGMA synchronous
Write = Callable[[sqlite3.Connection], Any]


@pytest.fixture
def database(tmp_path: Path) -> FileDatabase:
    return FileDatabase(tmp_path / "sessions.db", max_bytes=None, busy_timeout_s=60.0)


def put(name: str, *, is_synced: bool = True) -> Write:
    """Adds a row, and returns how safe its commit will be."""

    def work(connection: sqlite3.Connection) -> int:
        with transaction(connection) if is_synced else unsynced_transaction(connection):
            connection.execute("INSERT INTO expired_sessions VALUES ('a', ?, 0)", (name,))
            (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        return int(synchronous)

    return work


def refused(name: str, error: Exception) -> Write:
    """Adds a row and then raises."""

    def work(connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute("INSERT INTO expired_sessions VALUES ('a', ?, 0)", (name,))
            raise error

    return work


async def names(database: FileDatabase) -> list[str]:
    query = "SELECT session_id FROM expired_sessions ORDER BY session_id"
    return await database.read(lambda connection: [name for (name,) in connection.execute(query)])


async def at_once(database: FileDatabase, works: Sequence[Write], *, is_synced: bool = True) -> tuple[Any, list[str]]:
    """Their results or errors, and the statements, when all of them come while the writer is busy."""
    is_busy, may_go = threading.Event(), threading.Event()
    statements: list[str] = []

    def hold(connection: sqlite3.Connection) -> None:
        is_busy.set()
        may_go.wait()
        connection.set_trace_callback(statements.append)

    holding = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(is_busy.wait)
    waiting = [asyncio.create_task(database.write_short(work, is_synced=is_synced)) for work in works]
    await asyncio.sleep(0)  # each has taken its place
    may_go.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    await holding
    return results, statements


async def test_writes_that_wait_together_share_one_commit(database: FileDatabase) -> None:
    async with opened(database):
        results, statements = await at_once(database, [put("one"), put("two"), put("three")])
        assert (results, await names(database)) == ([FULL] * 3, ["one", "three", "two"])
    assert (statements.count("BEGIN IMMEDIATE"), statements.count("COMMIT")) == (1, 1)


async def test_small_new_sessions_share_the_commit_of_other_writes(tmp_path: Path) -> None:
    async with opened(SqliteSessionStore(tmp_path / "sessions.db")) as store:
        is_busy, may_go = threading.Event(), threading.Event()
        statements: list[str] = []

        def hold(connection: sqlite3.Connection) -> None:
            is_busy.set()
            may_go.wait()
            connection.set_trace_callback(statements.append)

        holding = asyncio.create_task(store.database.write(hold))
        await asyncio.to_thread(is_busy.wait)
        creating = [
            asyncio.create_task(stored_sessions.create(store, tenant="a", session_id=name, metadata={}))
            for name in "vwxyz"
        ]
        await asyncio.sleep(0)
        may_go.set()
        heads = await asyncio.gather(*creating)
        await holding
        assert [await store.get(head.key) for head in heads] == heads
    assert (statements.count("BEGIN IMMEDIATE"), statements.count("COMMIT")) == (1, 1)


async def test_a_new_session_that_finds_no_room_is_refused_and_the_writes_beside_it_are_made(
    tmp_path: Path,
) -> None:
    """The disk is full for whatever runs with others, or by itself without free pages."""
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    async with opened(FileDatabase(tmp_path / "sessions.db", max_bytes=None, busy_timeout_s=5.0)) as database:

        def hold(connection: sqlite3.Connection) -> None:
            is_busy.set()
            may_go.wait()

        def no_room(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                raise full

        is_busy, may_go = threading.Event(), threading.Event()
        holding = asyncio.create_task(database.write(hold))
        await asyncio.to_thread(is_busy.wait)
        waiting = [
            asyncio.create_task(database.write_short(put("one"), is_synced=True)),
            asyncio.create_task(database.write_new_short(no_room)),
        ]
        await asyncio.sleep(0)
        may_go.set()
        first, refusal = await asyncio.gather(*waiting, return_exceptions=True)
        await holding
        assert (first, await names(database)) == (FULL, ["one"])
    assert isinstance(refusal, StorageFull)


async def test_a_write_that_comes_alone_has_a_transaction_of_its_own(database: FileDatabase) -> None:
    async with opened(database):
        results, statements = await at_once(database, [put("one")])
        assert (results, await names(database)) == ([FULL], ["one"])
    assert not any(statement.startswith("SAVEPOINT") for statement in statements)


class OtherProcess:
    """Has the write lock, and counts how often the database's writer has found it taken."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._tried = threading.Semaphore(0)
        self.num_commits = 0

    async def take_lock(self, database: FileDatabase) -> None:
        def watch(connection: sqlite3.Connection) -> None:
            connection.set_trace_callback(self._note)

        await database.write(watch)
        await asyncio.to_thread(self._connection.execute, "BEGIN IMMEDIATE")

    def _note(self, statement: str) -> None:
        self.num_commits += statement == "COMMIT"
        if statement == "BEGIN IMMEDIATE":
            self._tried.release()

    async def is_found(self, times: int) -> None:
        for _ in range(times):
            await asyncio.to_thread(self._tried.acquire)

    def release(self) -> None:
        self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def other(database: FileDatabase, tmp_path: Path) -> Iterator[OtherProcess]:
    other = OtherProcess(tmp_path / "sessions.db")
    yield other
    other.close()


async def test_writes_that_come_while_another_process_writes_share_the_next_commit(
    database: FileDatabase, other: OtherProcess
) -> None:
    async with opened(database):
        await other.take_lock(database)
        first = asyncio.create_task(database.write_short(put("one", is_synced=False), is_synced=False))
        await other.is_found(2)  # by itself, then together with those that come
        later = [asyncio.create_task(database.write_short(put(name), is_synced=True)) for name in ("two", "three")]
        await asyncio.sleep(0)
        await other.is_found(3)  # in the last of these tries they take part
        other.release()
        assert await asyncio.gather(first, *later) == [FULL] * 3
        assert (other.num_commits, await names(database)) == (1, ["one", "three", "two"])


async def test_writes_that_waited_too_long_for_another_process_are_refused_together(
    tmp_path: Path, other: OtherProcess
) -> None:
    async with opened(FileDatabase(tmp_path / "sessions.db", max_bytes=None, busy_timeout_s=0.05)) as database:
        await other.take_lock(database)
        works = [database.write_short(put(name), is_synced=True) for name in ("one", "two")]
        refusals = await asyncio.gather(*works, return_exceptions=True)
        other.release()
        assert await names(database) == []
        assert await database.write_short(put("three"), is_synced=True) == FULL
    assert [(type(error), str(error)) for error in refusals] == [
        (StoreUnavailable, "the session store is locked by another process")
    ] * 2


async def test_a_refused_write_is_taken_back_alone(database: FileDatabase) -> None:
    async with opened(database):
        works = [put("one"), refused("two", VersionConflict("another version")), put("three")]
        (first, refusal, last), statements = await at_once(database, works)
        assert (first, last, await names(database)) == (FULL, FULL, ["one", "three"])
    assert isinstance(refusal, VersionConflict)
    assert statements.count("COMMIT") == 1


async def test_after_an_error_of_the_database_each_write_is_made_by_itself(database: FileDatabase) -> None:
    async with opened(database):
        works = [put("one"), refused("two", sqlite3.OperationalError("disk I/O error")), put("three")]
        (first, failure, last), _ = await at_once(database, works)
        assert (first, last, await names(database)) == (FULL, FULL, ["one", "three"])
    assert isinstance(failure, StoreUnavailable)


async def test_a_group_waits_for_the_disk_if_one_of_its_writes_does(database: FileDatabase) -> None:
    async with opened(database):
        weak = [put("one", is_synced=False), put("two", is_synced=False)]
        results, _ = await at_once(database, weak, is_synced=False)
        assert results == [NORMAL, NORMAL]
        mixed = [put("three", is_synced=False), put("four")]
        results, _ = await at_once(database, mixed)
        assert results == [FULL, FULL]


async def test_more_writes_than_fit_take_several_transactions(database: FileDatabase) -> None:
    works = [put(f"{number:03}") for number in range(MAX_WRITES + 2)]
    async with opened(database):
        results, statements = await at_once(database, works)
        assert (results, len(await names(database))) == ([FULL] * len(works), len(works))
    assert statements.count("COMMIT") == 2


async def test_a_write_whose_caller_was_cancelled_is_made(database: FileDatabase) -> None:
    async with opened(database):
        writing = asyncio.create_task(database.write_short(put("one"), is_synced=True))
        await asyncio.sleep(0)
        writing.cancel()
        await database.write_short(put("two"), is_synced=True)
        assert await names(database) == ["one", "two"]


async def test_X5_none_of_a_group_is_acknowledged_when_the_files_were_replaced(
    database: FileDatabase, tmp_path: Path
) -> None:
    def replace(connection: sqlite3.Connection) -> None:
        put("one")(connection)
        (tmp_path / "sessions.db").rename(tmp_path / "moved.db")

    async with opened(database):
        results, _ = await at_once(database, [replace, put("two")])
        (tmp_path / "moved.db").rename(tmp_path / "sessions.db")
    assert all(isinstance(result, StoreReplaced) for result in results)


async def test_a_closed_database_refuses(database: FileDatabase) -> None:
    async with opened(database):
        pass
    with pytest.raises(NsmError):
        await database.write_short(put("one"), is_synced=True)


async def test_a_write_waits_for_the_lock_of_another_and_later_statements_have_the_timeout_and_the_disk(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sessions.db"
    async with opened(FileDatabase(path, max_bytes=None, busy_timeout_s=7.0)) as database:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
            other.execute("BEGIN IMMEDIATE")
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, other.execute, "ROLLBACK")

            def write(connection: sqlite3.Connection) -> None:
                with unsynced_transaction(connection):
                    connection.execute("INSERT INTO usage (tenant, num_sessions, num_bytes) VALUES ('x', 0, 0)")

            def pragmas(connection: sqlite3.Connection) -> list[int]:
                return [
                    int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("busy_timeout", "synchronous")
                ]

            await database.write_short(write, is_synced=False)
            assert not other.in_transaction
            assert await database.write(pragmas) == [7_000, FULL]


async def test_reads_that_wait_together_have_their_own_results_and_a_cancelled_one_runs(database: FileDatabase) -> None:
    is_busy, may_go = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold(connection: sqlite3.Connection) -> None:
        is_busy.set()
        may_go.wait()

    def read(number: int) -> Write:
        def work(connection: sqlite3.Connection) -> int:
            ran.append(number)
            if number == 1:
                raise NotFound("one is not there")
            return number

        return work

    async with opened(database):
        holding = asyncio.create_task(database.read(hold))
        await asyncio.to_thread(is_busy.wait)
        reads = [asyncio.create_task(database.read(read(number))) for number in range(4)]
        await asyncio.sleep(0)
        reads[2].cancel()
        await asyncio.sleep(0)
        may_go.set()
        await holding
        results = await asyncio.gather(*reads, return_exceptions=True)
    assert ran == [0, 1, 2, 3]
    assert [type(result) for result in results] == [int, NotFound, asyncio.CancelledError, int]
