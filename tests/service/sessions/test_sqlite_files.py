"""The SQLite store's files: whose they are, of which schema, and what is not one of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sqlite3
import stat
import threading
import zlib
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError, StoreUnavailable
from service.records.factory import records_beside
from service.sessions import sqlite_schema
from service.sessions.base import LogMark, SessionHead, TenantUsage
from service.sessions.records import encode_ids
from service.sessions.sqlite import SqliteSessionStore
from tests import stored_sessions
from tests.snapshots import make_snapshot
from tests.stored_sessions import acquire, commit, opened

KEY = {"tenant": "default", "session_id": "s1"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


async def create(store: SqliteSessionStore, session_id: str = "s1") -> SessionHead:
    return await stored_sessions.create(store, session_id, tenant="default", metadata={})


async def test_the_files_belong_to_their_owner_alone(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        (presence,) = (name for name in modes if name.startswith("sessions.db-open-"))
        assert set(modes) == {"sessions.db", "sessions.db-wal", "sessions.db-shm", "sessions.db-reserve", presence}
        assert set(modes.values()) == {0o600}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_file_of_a_newer_schema_is_refused(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO schema_versions VALUES (99, 0)")
    with pytest.raises(ConfigError, match="schema 99"):
        await SqliteSessionStore(path).open()


async def test_a_file_of_an_older_schema_is_migrated_with_its_sessions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await commit(store, await create(store))
    newer = (*sqlite_schema.MIGRATIONS, "CREATE TABLE labels (name TEXT); INSERT INTO labels VALUES ('new')")
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", newer)
    for _ in range(2):  # the second time nothing is left to do
        async with opened(SqliteSessionStore(path)) as store:
            assert await store.get(**KEY) == head
    with contextlib.closing(sqlite3.connect(path)) as other:
        found = other.execute("SELECT version FROM schema_versions").fetchall()
        assert found == [(number + 1,) for number in range(len(newer))]
        assert other.execute("SELECT name FROM labels").fetchall() == [("new",)]


async def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await create(store)
    broken = (*sqlite_schema.MIGRATIONS, "DROP TABLE probe; ALTER TABLE nowhere ADD COLUMN x")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_schema, "MIGRATIONS", broken)
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await SqliteSessionStore(path).open()
    async with opened(SqliteSessionStore(path)) as store:
        assert await store.get(**KEY) == head
        await store.check_writable()


async def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(ConfigError, match="another program"):
        await SqliteSessionStore(path).open()
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.fixture
def no_database(tmp_path: Path) -> Path:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"not a database, by far " * 100)
    return file


async def test_a_file_that_is_no_database_is_unavailable(no_database: Path) -> None:
    with pytest.raises(StoreUnavailable, match="damaged or not a database"):
        await SqliteSessionStore(no_database).open()


async def test_a_place_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot create"):
        await SqliteSessionStore(tmp_path / "file" / "sessions.db").open()


async def make_schema_1_file(path: Path) -> tuple[int, ...]:
    """A file as the first build left it: two turns of one session. Returns the log."""
    path.parent.mkdir()
    chunks = ((1, (5, 6, 7)), (2, (8,)))
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        old.execute("CREATE TABLE schema_versions (version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL)")
        old.executescript(sqlite_schema.MIGRATIONS[0])
        old.execute("INSERT INTO schema_versions VALUES (1, 0)")
        raw = make_snapshot(version=2).encode()
        row = ("default", "s1", 2, 4, 10.0, 20.0, "m1", '{"k": "v"}', 4, len(raw))
        old.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        old.execute("INSERT INTO snapshots VALUES ('default', 's1', 2, ?)", (raw,))
        for version, ids in chunks:
            old.execute("INSERT INTO log_chunks VALUES ('default', 's1', ?, ?)", (version, encode_ids(ids)))
    return tuple(token for _, ids in chunks for token in ids)


async def test_the_sessions_of_a_schema_1_file_go_on_in_this_build(path: Path) -> None:
    log = await make_schema_1_file(path)
    raw = make_snapshot(version=2).encode()
    async with opened(SqliteSessionStore(path)) as store:
        stored = await store.load(**KEY)
        head = stored.head
        assert stored.snapshot == raw
        assert (head.version, head.position, head.created_at, head.updated_at) == (2, 4, 10.0, 20.0)
        assert (dict(head.metadata), head.ttl_s, head.expires_at, head.forked_from) == ({"k": "v"}, None, None, None)
        assert await store.read_log(**KEY) == log
        assert await store.log_marks(**KEY) == (
            LogMark(version=1, num_log_tokens=3, num_sampled=0, seed=None),
            LogMark(version=2, num_log_tokens=4, num_sampled=0, seed=None),
        )
        assert await store.usage(tenant="default") == TenantUsage(num_sessions=1, num_bytes=len(raw) + 16)
        assert (await commit(store, head)).version == 3
        assert await store.read_log(**KEY) == (*log, 1, 2, 3)
        await store.delete(**KEY)
        assert await store.usage(tenant="default") == TenantUsage(num_sessions=0, num_bytes=0)


async def test_what_a_schema_5_file_holds_of_running_turns_and_documents_counts_from_now_on(path: Path) -> None:
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.create_function("crc32", 1, zlib.crc32)
        old.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        old.execute("CREATE TABLE schema_versions (version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL)")
        for script in sqlite_schema.MIGRATIONS[:5]:
            old.executescript(script)
        old.execute("INSERT INTO schema_versions VALUES (5, 0)")
        old.execute(
            "INSERT INTO sessions (tenant, session_id, version, position, created_at, updated_at, model_fingerprint, "
            "metadata, num_log_tokens, snapshot_bytes) VALUES ('default', 's1', 0, 0, 10.0, 20.0, 'm1', '{}', 0, 0)"
        )
        old.execute(
            "INSERT INTO turns (tenant, session_id, turn_id, digest, base_version, status, request) "
            "VALUES ('default', 's1', 't1', 'd', 0, 'running', x'0000')"
        )
        old.execute("INSERT INTO turn_chunks VALUES (1, 0, x'000000')")
        old.execute("INSERT INTO records VALUES ('default', 'item', 'i1', 1, '{\"a\": 1}', NULL)")
    async with opened(SqliteSessionStore(path)) as store:
        records = records_beside(store)
        assert await store.usage(tenant="default") == TenantUsage(num_sessions=1, num_bytes=5)
        assert await records.usage(tenant="default") == len('{"a": 1}')
        await store.delete(**KEY)
        await records.delete(tenant="default", kind="item", record_id="i1")
        assert await store.usage(tenant="default") == TenantUsage(num_sessions=0, num_bytes=0)
        assert await records.usage(tenant="default") == 0


async def test_files_of_killed_processes_are_cleared_away(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        left = path.with_name("sessions.db-open-0123")
        left.touch()
        async with opened(SqliteSessionStore(path)):
            assert not left.exists()
            assert len(list(path.parent.glob("sessions.db-open-*"))) == 2
        await acquire(store, tenant="default")
    assert [file.name for file in path.parent.iterdir()] == ["sessions.db"]


def test_who_begins_on_a_new_file_at_the_same_moment_gets_in(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number in range(20):
            path, together = tmp_path / f"{number}.db", threading.Barrier(4)
            sqlite_schema.create_file(path)

            def begin(path: Path = path, together: threading.Barrier = together) -> None:
                together.wait()
                with contextlib.closing(sqlite_schema.connect(path, busy_timeout_s=5.0)) as connection:
                    sqlite_schema.migrate(connection, path)

            for done in [pool.submit(begin) for _ in range(4)]:
                done.result()
