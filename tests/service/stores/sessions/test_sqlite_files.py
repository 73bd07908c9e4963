"""The SQLite store's files: whose they are, of which schema, and what is not one of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError, SnapshotCorrupt, StoreDamaged, StoreUnavailable
from nsm_core.hashing import checksum
from service.stores.sessions.base import SessionHead
from service.stores.sessions.codec import encode_ids
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sessions.turn_records import EndedTurn, TurnStart
from service.stores.sqlite import schema as sqlite_schema
from tests.support import stored_sessions
from tests.support.damaged_pages import damage_table
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import Clock, acquire, commit, opened

BESIDE = {"sessions.db", *(f"sessions.db-{name}" for name in ("wal", "shm", "ballast", "stamp"))}
KEY = SessionKey("default", "s1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


async def create(store: SqliteSessionStore, session_id: str = "s1") -> SessionHead:
    return await stored_sessions.create(store, session_id, tenant="default", metadata={})


async def test_the_files_belong_to_their_owner_alone(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        (lock_file,) = (name for name in modes if name.startswith("sessions.db-open-"))
        assert set(modes) == {*BESIDE, lock_file}
        assert set(modes.values()) == {0o600}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("version", [0, 7, 99])
async def test_a_file_of_an_unknown_schema_version_is_refused(path: Path, version: int) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(ConfigError, match=f"has schema version {version}, this build knows versions 1 to 6"):
        await SqliteSessionStore(path).open()
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (version,)


async def test_a_new_file_has_the_newest_schema_version_and_the_application_id(path: Path) -> None:
    async with opened(SqliteSessionStore(path)):
        pass
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (len(sqlite_schema.MIGRATIONS),)
        assert other.execute("PRAGMA application_id").fetchone() == (sqlite_schema.APPLICATION_ID,)


async def test_a_session_of_schema_1_has_its_snapshot_at_its_head(path: Path) -> None:
    raw, ids = make_snapshot(version=1).encode(), encode_ids((1, 2, 3))
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.executescript(sqlite_schema.BASELINE)
        old.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        old.execute("PRAGMA user_version = 1")
        columns = "tenant, session_id, version, position, created_at, updated_at, model_fingerprint, metadata"
        statement = f"INSERT INTO sessions ({columns}, num_log_tokens, snapshot_bytes) VALUES (?,?,?,?,?,?,?,?,?,?)"
        old.execute(statement, (*KEY, 1, 3, 5.0, 5.0, "m1", "{}", 3, len(raw)))
        old.execute(statement, (KEY.tenant, "empty", 0, 0, 5.0, 5.0, "m1", "{}", 0, 0))
        old.execute("INSERT INTO snapshots VALUES (?, ?, 1, ?)", (*KEY, raw))
        old.execute("INSERT INTO log_chunks VALUES (?, ?, 1, ?, 1, '7', ?)", (*KEY, ids, checksum(ids)))
    async with opened(SqliteSessionStore(path)) as store:
        stored = await store.load(KEY)
        assert (stored.head.snapshot_version, stored.head.snapshot_position, stored.snapshot) == (1, 3, raw)
        assert (await store.usage(tenant=KEY.tenant)).num_bytes == len(raw) + 12
        assert (await store.get(SessionKey(KEY.tenant, "empty"))).snapshot_version == 0
        assert (await commit(store, stored.head)).snapshot_version == 2


async def test_turn_records_of_schema_4_are_kept(path: Path) -> None:
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        for script in sqlite_schema.MIGRATIONS[:4]:
            old.executescript(script)
        old.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        old.execute("PRAGMA user_version = 4")
        columns = "tenant, session_id, version, position, created_at, updated_at, model_fingerprint, metadata"
        statement = f"INSERT INTO sessions ({columns}, num_log_tokens, snapshot_bytes) VALUES (?,?,?,?,?,?,?,?,?,?)"
        old.execute(statement, (*KEY, 0, 0, 5.0, 5.0, "m1", "{}", 0, 0))
        turns = "tenant, session_id, turn_id, identity, digest, base_version, status, request, result, expires_at"
        statement = f"INSERT INTO turns ({turns}) VALUES (?,?,?,?,?,?,?,?,?,?)"
        old.execute(statement, (*KEY, "t1", "key:1", "d", 0, "committed", b"", None, 50.0))
        old.execute("UPDATE turns SET result = ? WHERE turn_id = 't1'", (b"result",))
        old.execute(statement, (*KEY, "t2", None, "d", 0, "running", b"request", None, None))
        (number,) = old.execute("SELECT number FROM turns WHERE turn_id = 't2'").fetchone()
        old.execute("INSERT INTO turn_chunks VALUES (?, 0, ?, ?)", (number, b"chunk", KEY.tenant))
    clock = Clock()
    async with opened(SqliteSessionStore(path, clock=lambda: 10.0)) as store:
        assert (await store.usage(tenant=KEY.tenant)).num_bytes == len(b"result" + b"chunk")
        running, ended = await store.get_turn(KEY, turn_id="t2"), await store.get_turn(KEY, identity="key:1")
        assert running is not None
        assert ended is not None
        assert (running.request, running.chunks, ended.result) == (b"request", (b"chunk",), b"result")
    async with opened(SqliteSessionStore(path, clock=clock)) as store:  # 1000: the result has expired
        await store.remove_expired()
        assert (await store.usage(tenant=KEY.tenant)).num_bytes == len(b"chunk")
        assert await store.get_turn(KEY, turn_id="t1") is None


async def test_logs_records_and_stamp_of_schema_5_are_kept(path: Path) -> None:
    other = SessionKey(KEY.tenant, "s2")
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        for script in sqlite_schema.MIGRATIONS[:5]:
            old.executescript(script)
        old.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
        old.execute("PRAGMA user_version = 5")
        old.execute("UPDATE stamp SET value = 41")
        columns = "tenant, session_id, version, position, created_at, updated_at, model_fingerprint, metadata"
        statement = f"INSERT INTO sessions ({columns}, num_log_tokens, snapshot_bytes) VALUES (?,?,?,?,?,?,?,?,?,?)"
        for version in (1, 2):  # the logs of two sessions, one row of each in turns
            for key in (KEY, other):
                ids = encode_ids((version, len(key.session_id), 7))
                if version == 1:
                    old.execute(statement, (*key, 2, 5, 5.0, 5.0, "m1", "{}", 6, 0))
                chunk = (*key, version, ids, 1, str(2**64 - version), checksum(ids))
                old.execute("INSERT INTO log_chunks VALUES (?, ?, ?, ?, ?, ?, ?)", chunk)
        turns = "tenant, session_id, turn_id, identity, digest, base_version, status, request, expires_at"
        for number in range(3):
            values = (*KEY, f"t{number}", "key:1", f"d{number}", number, "failed", b"", 50.0)
            old.execute(f"INSERT INTO turns ({turns}) VALUES (?,?,?,?,?,?,?,?,?)", values)
    async with opened(SqliteSessionStore(path, clock=lambda: 10.0)) as store:
        for key in (KEY, other):
            assert await store.read_log(key) == (1, 2, 7, 2, 2, 7)
            assert [(mark.version, mark.seed) for mark in await store.log_marks(key)] == [
                (1, 2**64 - 1),
                (2, 2**64 - 2),
            ]
        leased = await acquire(store, tenant=KEY.tenant)
        start = TurnStart(
            turn_id="t9", identity="key:1", digest="d", base_version=2, model_fingerprint="m1", request=b""
        )
        found = await store.begin_turn(leased.lease, start, max_records=3)
        assert found is not None
        assert (found.turn_id, found.base_version) == ("t2", 2)  # the newest of those with this identity
        await commit(store, await store.get(other))
        await store.delete(other)
        assert len(await store.read_log(KEY)) == 6
        assert (await store.usage(tenant=KEY.tenant)).num_bytes == 4 * 6
    with contextlib.closing(sqlite3.connect(path)) as after:
        assert after.execute("SELECT stamp FROM usage WHERE tenant = ''").fetchone() >= (43,)
        assert after.execute("SELECT count(*) FROM log_chunks").fetchone() == (2,)
        assert after.execute("PRAGMA foreign_key_check").fetchall() == []


async def test_a_file_of_an_older_schema_is_migrated_with_its_sessions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await commit(store, await create(store))
    newer = (*sqlite_schema.MIGRATIONS, "CREATE TABLE labels (name TEXT); INSERT INTO labels VALUES ('new')")
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", newer)
    for _ in range(2):  # the second time nothing is left to do
        async with opened(SqliteSessionStore(path)) as store:
            assert await store.get(KEY) == head
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA user_version").fetchone() == (len(newer),)
        assert other.execute("SELECT name FROM labels").fetchall() == [("new",)]


async def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await create(store)
    broken = (*sqlite_schema.MIGRATIONS, "DROP TABLE usage; ALTER TABLE nowhere ADD COLUMN x")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_schema, "MIGRATIONS", broken)
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await SqliteSessionStore(path).open()
    async with opened(SqliteSessionStore(path)) as store:
        assert await store.get(KEY) == head
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


async def test_X5_a_store_that_has_met_damaged_pages_is_not_writable_until_it_is_opened_again(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await commit(store, await create(store))
    damage_table(path, "log_chunks")
    store = SqliteSessionStore(path)
    for _ in range(2):
        async with opened(store):
            await store.check_writable()  # nobody has read them
            with pytest.raises(StoreDamaged) as caught:
                await store.read_log(KEY)
            assert str(path) in caught.value.with_notes()
            with pytest.raises(StoreDamaged) as caught:
                await store.check_writable()
            assert str(path) in caught.value.with_notes()


async def test_a_place_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot create"):
        await SqliteSessionStore(tmp_path / "file" / "sessions.db").open()


async def test_files_of_killed_processes_are_cleared_away(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        left = path.with_name("sessions.db-open-0123")
        left.touch()
        async with opened(SqliteSessionStore(path)):
            assert not left.exists()
            assert len(list(path.parent.glob("sessions.db-open-*"))) == 2
        await acquire(store, tenant="default")
    assert {file.name for file in path.parent.iterdir()} == {"sessions.db", "sessions.db-ballast", "sessions.db-stamp"}


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


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE turns SET turn_order = 'x'", "a turn record of session 's1' is damaged"),
        ("UPDATE sessions SET turn_id = 't9'", "the running turn of session 's1' is damaged"),
        ("UPDATE sessions SET fence = 'x'", "the lease of session 's1' is damaged"),
    ],
)
async def test_R3_columns_of_another_type_are_damage(path: Path, statement: str, message: str) -> None:
    """A page of a disk that lied may have any."""
    start = TurnStart(turn_id="t1", identity=None, digest="d", base_version=None, model_fingerprint="m1", request=b"{}")
    async with opened(SqliteSessionStore(path)) as store:
        head = await create(store)
        leased = await store.acquire(KEY, holder="h", lease_s=10.0, start=start)
        ended = EndedTurn(turn_id="t1", result=b"r", ttl_s=100.0)
        await stored_sessions.commit_under(store, leased.lease, head, turn=ended)
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute(statement)
        with pytest.raises(SnapshotCorrupt, match=message):
            await store.acquire(KEY, holder="h", lease_s=10.0, start=start)
