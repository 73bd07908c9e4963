from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from nsm_core.errors import (
    LeaseLost,
    NotFound,
    SessionBusy,
    SnapshotCorrupt,
    StorageFull,
    StoreUnavailable,
    VersionConflict,
)
from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite import schema as sqlite_schema
from tests.service.stores.sessions.writer_process import turn_ids
from tests.support import stored_sessions
from tests.support.counts import scaled
from tests.support.snapshots import make_snapshot
from tests.support.stored_rows import VERSION
from tests.support.stored_sessions import LEASE_S, Clock, acquire, commit, commit_under, opened

REPOSITORY = Path(__file__).parents[4]
KEY = SessionKey("default", "s1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


async def create(store: SqliteSessionStore, session_id: str = "s1") -> SessionHead:
    return await stored_sessions.create(store, session_id, tenant="default", metadata={})


async def start_writer(path: Path, *, num_commits: int, token: int = 0) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tests.service.stores.sessions.writer_process"]
    return await asyncio.create_subprocess_exec(
        *command, str(path), "s1", str(num_commits), str(token), cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
    )


async def test_sessions_survive_a_restart(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await commit(store, await create(store))
    async with opened(SqliteSessionStore(path)) as store:
        stored = await store.load(KEY)
        assert stored.head == head
        assert stored.snapshot == make_snapshot(version=1).encode()
        assert await store.read_log(KEY) == (1, 2, 3)


async def test_kill_9_in_any_moment_loses_nothing_that_was_acknowledged(path: Path) -> None:
    rng = random.Random(7)
    num_acknowledged = 0  # the writer that comes next need not wait for the lease of the one that was killed
    for _ in range(scaled(5, 200)):
        writer = await start_writer(path, num_commits=1_000_000)
        assert writer.stdout is not None
        for _ in range(rng.randint(1, 6)):
            num_acknowledged = int(await writer.stdout.readline())
        await asyncio.sleep(rng.uniform(0, 0.01))  # any moment of the commit that runs now
        writer.kill()
        rest = await writer.stdout.read()
        await writer.wait()
        num_acknowledged = int(rest.splitlines()[-1]) if rest else num_acknowledged
        await assert_head_snapshot_and_log_agree(path, num_acknowledged)


async def assert_head_snapshot_and_log_agree(path: Path, num_acknowledged: int) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        stored = await store.load(KEY)
        log = await store.read_log(KEY)
    # The last turn may be durable without its acknowledgement having left the process.
    assert stored.head.version in (num_acknowledged, num_acknowledged + 1)
    assert stored.snapshot is not None
    header = Snapshot.decode(stored.snapshot).header
    assert (header.version, header.position) == (stored.head.version, stored.head.position)
    assert log == tuple(token for turn in range(1, header.version + 1) for token in turn_ids(turn))
    assert stored.head.num_log_tokens == stored.head.position == len(log)


async def test_two_processes_on_one_file_never_overwrite_each_other(path: Path) -> None:
    num_commits = scaled(15, 500)
    writers = [await start_writer(path, num_commits=num_commits, token=token) for token in (1, 2)]
    outputs = [(await writer.communicate())[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    versions = sorted(int(line) for output in outputs for line in output.splitlines())
    assert versions == list(range(1, 2 * num_commits + 1))
    async with opened(SqliteSessionStore(path)) as store:
        log = await store.read_log(KEY)
    assert (log.count(1), log.count(2)) == (num_commits, num_commits)


async def fill(store: SqliteSessionStore, heads: list[SessionHead]) -> None:
    for number in range(100):
        head = await create(store, f"s{number}")
        heads.append(await commit(store, head, num_floats=200_000))


async def test_a_full_disk_takes_no_new_session_and_keeps_the_old_ones(path: Path) -> None:
    async with opened(SqliteSessionStore(path, max_bytes=4_000_000)) as store:
        heads: list[SessionHead] = []
        with pytest.raises(StorageFull, match="is full"):
            await fill(store, heads)
        assert len(heads) >= 2
        for head in heads:
            stored = await store.load(SessionKey("default", head.session_id))
            assert stored.head == head
            assert stored.snapshot == make_snapshot(session_id=head.session_id, num_floats=200_000).encode()
        half_made = f"s{len(heads)}"
        assert (await store.load(SessionKey("default", half_made))).snapshot is None
        assert (
            await commit(store, heads[0], num_floats=200_000)
        ).version == 2  # it takes the place of its old snapshot
        await store.delete(SessionKey("default", heads[1].session_id))
        await commit(store, await store.get(SessionKey("default", half_made)), num_floats=200_000)


async def test_deletion_leaves_no_bytes_behind(path: Path) -> None:
    snapshot = make_snapshot(num_floats=50_000)
    state, log = snapshot.state[:64], (0xDEADBEEF).to_bytes(4, "little") * 4
    async with opened(SqliteSessionStore(path)) as store:
        await commit(store, await create(store), num_floats=50_000, new_ids=(0xDEADBEEF,) * 50)
        files = [path, path.with_name("sessions.db-wal")]
        assert any(state in file.read_bytes() for file in files)
        assert any(log in file.read_bytes() for file in files)
        await store.delete(KEY)
        for file in files:
            raw = file.read_bytes()
            assert state not in raw, file
            assert log not in raw, file


async def test_a_damaged_snapshot_is_an_error_never_an_empty_state(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await commit(store, await create(store))
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE snapshots SET snapshot = substr(snapshot, 2)")
        with pytest.raises(SnapshotCorrupt, match="session 's1': snapshot refused"):
            await store.load(KEY)
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("DELETE FROM snapshots")
        with pytest.raises(SnapshotCorrupt, match="no snapshot of its version 1"):
            await store.load(KEY)


@pytest.mark.parametrize("ids", ["x'0100'", "x'01000000'"])
async def test_a_damaged_log_is_an_error(path: Path, ids: str) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await commit(store, await create(store))
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute(f"UPDATE log_chunks SET ids = {ids}")
        with pytest.raises(SnapshotCorrupt, match="log"):
            await store.read_log(KEY)


async def test_a_write_that_waits_for_a_lock_stops_neither_reads_nor_the_event_loop(path: Path) -> None:
    async with opened(SqliteSessionStore(path, busy_timeout_s=60.0)) as store:
        head = await create(store)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(commit(store, head))
            assert await store.get(KEY) == head
            assert not waiting.done()
            other.execute("ROLLBACK")
            head = await waiting
        assert head.version == 1


async def test_a_write_that_waits_too_long_for_a_lock_is_refused_and_may_come_again(path: Path) -> None:
    async with opened(SqliteSessionStore(path, busy_timeout_s=0.3)) as store:
        head = await create(store)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked by another process"):
                await commit(store, head)
            other.execute("ROLLBACK")
        assert (await commit(store, head)).version == 1


async def test_D1_a_cancelled_call_neither_tears_a_commit_nor_answers_another_call(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store, "other")
        head = await create(store)
        for _ in range(scaled(10, 500)):
            lease = (await acquire(store, tenant="default")).lease
            task = asyncio.create_task(commit_under(store, lease, head))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (await store.get(SessionKey("default", "other"))).session_id == "other"
            await store.release(lease)  # behind the commit in the writer's queue
            stored = await store.load(KEY)
            assert stored.head.version - head.version in (0, 1)
            assert stored.head.num_log_tokens == 3 * stored.head.version == len(await store.read_log(KEY))
            head = stored.head


async def test_commits_are_synced_to_the_disk(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        with contextlib.closing(sqlite_schema.connect(path, busy_timeout_s=1.0)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
            assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)


async def test_a_store_that_is_not_open_is_unavailable(path: Path) -> None:
    store = SqliteSessionStore(path)
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.get(KEY)
    async with opened(store):
        await create(store)
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.check_writable()


async def test_an_error_inside_a_transaction_does_not_hinder_the_next(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await create(store)
        with pytest.raises(VersionConflict):
            await create(store)
        with pytest.raises(NotFound):
            await store.delete(SessionKey("default", "nobody"))
        assert (await commit(store, head)).version == 1


async def test_P5_two_stores_on_one_file_share_its_leases(path: Path) -> None:
    clock = Clock()
    async with (
        opened(SqliteSessionStore(path, clock=clock)) as one,
        opened(SqliteSessionStore(path, clock=clock)) as two,
    ):
        head = await create(one)
        lease = (await acquire(one, tenant="default")).lease
        with pytest.raises(SessionBusy):
            await acquire(two, tenant="default")
        clock.advance(LEASE_S + 1)
        taken = await acquire(two, tenant="default")
        with pytest.raises(LeaseLost):
            await commit_under(one, lease, head)
        assert (await commit_under(two, taken.lease, head)).version == 1


async def test_the_lease_of_a_store_that_was_closed_may_be_taken_at_once(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        async with opened(SqliteSessionStore(path)) as other:
            lease = (await acquire(other, tenant="default")).lease
        assert (await acquire(store, tenant="default")).lease.fence == lease.fence + 1


async def test_D8_a_stopped_holder_keeps_its_lease_and_a_killed_one_loses_it_at_once(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await create(store)
        command = [sys.executable, "-m", "tests.service.stores.sessions.holder_process", str(path), "s1"]
        holder = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE)
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"acquired\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(SessionBusy):
            await acquire(store, tenant="default")
        holder.kill()
        await holder.wait()
        assert (await acquire(store, tenant="default")).lease.fence == 2


@pytest.mark.parametrize("version", [1, 2])
async def test_a_damaged_chunk_of_the_log_is_told_by_its_checksum(path: Path, version: int) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await commit(store, await commit(store, await create(store)))
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute(f"UPDATE log_chunks SET ids = x'090000000200000003000000' WHERE {VERSION} = ?", (version,))
        with pytest.raises(SnapshotCorrupt, match="log of session 's1' is damaged: a part of it fails its checksum"):
            await store.read_log(KEY)


async def test_a_missing_snapshot_is_told_with_the_lease(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = await commit(store, await create(store))
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("DELETE FROM snapshots")
        stored = (await acquire(store, tenant="default")).stored
        assert (stored.head, stored.snapshot, stored.damage) == (head, None, "missing")
