"""A real file system of a few megabytes, filled to the last byte."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from nsm_core.errors import NotFound, StorageFull
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import MAX_RETAINED, Retention
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.ballast import BALLAST_BYTES, SLACK_BYTES, Ballast
from service.stores.sqlite.schema import CHECKPOINT_PAGES, PAGE_BYTES
from service.stores.states.base import NewState
from service.stores.states.sqlite import SqliteStateStore
from tests.service.stores.sessions.test_sqlite import start_writer
from tests.support import stored_sessions
from tests.support.counts import scaled
from tests.support.stored_sessions import commit, opened

TENANT = "default"
NUM_FLOATS = 100_000


@pytest.fixture(params=[24, 40], ids=["24MB", "40MB"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The only thing on it is the store's directory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def path(disk: Path) -> Path:
    return disk / "data" / "sessions.db"


async def fill_with_sessions(store: SqliteSessionStore) -> list[SessionHead]:
    heads: list[SessionHead] = []
    with pytest.raises(StorageFull):
        for number in range(1_000):
            head = await stored_sessions.create(store, f"s{number}", tenant=TENANT, metadata={})
            heads.append(await commit(store, head, num_floats=NUM_FLOATS))
    return heads


def fill_with_other_data(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "other").open("ab", buffering=0) as other:
        while True:
            other.write(b"x" * 4096)


async def test_X20_the_room_of_the_disk_is_measured_before_it_is_full(disk: Path, path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        await stored_sessions.create(store, "s", tenant=TENANT, metadata={})
        room = await store.room()
        assert room is not None
        assert room.num_bytes == shutil.disk_usage(disk).total
        fill_with_other_data(disk)
        full = await store.room()
        assert full is not None
        assert full.num_free == 0 < room.num_free
    with pytest.raises(StorageFull):
        await SqliteSessionStore(path.with_name("new.db")).open()
    (disk / "other").unlink()
    async with opened(SqliteSessionStore(path.with_name("bounded.db"), max_bytes=1 << 20)) as store:
        bounded = await store.room()
        assert bounded is not None
        assert bounded.num_bytes == 1 << 20
        assert bounded.num_free <= 1 << 20


async def delete(store: SqliteSessionStore, head: SessionHead) -> None:
    await store.delete(SessionKey(TENANT, head.session_id))
    with pytest.raises(NotFound):
        await store.get(SessionKey(TENANT, head.session_id))


@pytest.mark.tmpfs
async def test_sessions_can_be_deleted_from_a_full_disk_and_their_room_is_used_again(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_sessions(store)
        for head in heads[:12]:
            await delete(store, head)
        created = await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        assert (await commit(store, created, num_floats=NUM_FLOATS)).version == 1
        assert (await store.load(heads[12].key)).head == heads[12]


@pytest.mark.tmpfs
async def test_a_disk_may_be_filled_and_emptied_again_and_again(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        for _ in range(scaled(2, 3)):
            await fill_with_sessions(store)
            page = await store.list(tenant=TENANT, limit=1_000)
            for head in page.heads:
                await delete(store, head)


@pytest.mark.tmpfs
async def test_sessions_can_be_deleted_from_a_full_disk_after_a_restart(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_sessions(store)
    async with opened(SqliteSessionStore(path)) as store:
        await delete(store, heads[0])


@pytest.mark.tmpfs
async def test_sessions_can_be_deleted_when_others_filled_the_disk_after_a_kill(disk: Path, path: Path) -> None:
    writer = await start_writer(path, num_commits=1_000_000)
    assert writer.stdout is not None
    for _ in range(12):
        await writer.stdout.readline()
    writer.kill()
    await writer.communicate()
    fill_with_other_data(disk)
    async with opened(SqliteSessionStore(path)) as store:
        fill_with_other_data(disk)
        await delete(store, await store.get(SessionKey(TENANT, "s1")))


@pytest.mark.tmpfs
async def test_sessions_whose_time_is_up_make_room_on_a_full_disk(path: Path) -> None:
    clock = stored_sessions.Clock()
    async with opened(SqliteSessionStore(path, clock=clock)) as store:
        head = await stored_sessions.create(store, "short", tenant=TENANT, metadata={}, ttl_s=10.0)
        await commit(store, head, num_floats=NUM_FLOATS)
        await fill_with_sessions(store)
        clock.advance(20.0)
        assert await store.remove_expired() == 1


async def test_a_store_has_a_ballast_while_it_is_open_and_for_its_next_start(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    ballast = tmp_path / "sessions.db-ballast"
    async with opened(SqliteSessionStore(path)):
        assert ballast.stat().st_blocks * 512 >= BALLAST_BYTES
        async with opened(SqliteSessionStore(path)):
            pass
        assert ballast.stat().st_size == BALLAST_BYTES
    assert ballast.stat().st_blocks * 512 >= BALLAST_BYTES


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [24], ids=["24MB"], indirect=True)
async def test_X20_a_store_that_was_closed_opens_on_a_disk_that_others_filled(disk: Path, path: Path) -> None:
    ballast = path.with_name("sessions.db-ballast")
    async with opened(SqliteSessionStore(path)) as store:
        head = await stored_sessions.create(store, "s", tenant=TENANT, metadata={})
        other = await stored_sessions.create(store, "other", tenant=TENANT, metadata={})
        head = await commit(store, head, num_floats=STATE_FLOATS)
    fill_with_other_data(disk)
    await SqliteSessionStore(path).check()
    async with opened(SqliteSessionStore(path)) as store, opened(SqliteSessionStore(path)) as second:
        assert (await second.load(head.key)).head == head
        head = await commit_turns(store, head, 2)
        await delete(second, other)
        with pytest.raises(StorageFull):
            await stored_sessions.create(second, "new", tenant=TENANT, metadata={})
    async with opened(SqliteSessionStore(path)) as store:
        (disk / "other").unlink()
        assert (await commit_turns(store, head, 1)).version == head.version + 1
        assert ballast.stat().st_size == BALLAST_BYTES


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [24], ids=["24MB"], indirect=True)
@pytest.mark.parametrize("refuse", [SqliteSessionStore.check, SqliteSessionStore.open], ids=["check", "open"])
async def test_X20_a_full_disk_without_a_ballast_refuses_the_start_in_plain_words(
    disk: Path, path: Path, refuse: Callable[[SqliteSessionStore], Awaitable[None]]
) -> None:
    """A server checks its store before it loads a model, and opens it behind that."""
    async with opened(SqliteSessionStore(path)):
        pass
    path.with_name("sessions.db-ballast").unlink()
    fill_with_other_data(disk)
    with pytest.raises(StorageFull) as refused:
        await refuse(SqliteSessionStore(path))
    assert refused.value.with_notes() == (
        f"the session store is full: delete sessions, or free its disk ({path}: no room on its disk)"
    )


async def test_the_write_ahead_log_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    log = tmp_path / "sessions.db-wal"
    async with opened(SqliteSessionStore(path)) as store:
        for number in range(40):
            head = await stored_sessions.create(store, f"s{number}", tenant=TENANT, metadata={})
            await commit(store, head, num_floats=NUM_FLOATS)
            assert log.stat().st_size < 1.3 * CHECKPOINT_PAGES * PAGE_BYTES


def test_a_ballast_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "nowhere" / "sessions.db")
    assert not ballast.make()
    with ballast.released():
        assert not ballast.make()


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_a_session_that_takes_more_than_the_ballast_can_be_deleted_from_a_full_disk(
    disk: Path, path: Path
) -> None:
    """Its newest snapshot and MAX_RETAINED older ones: 15 MB to overwrite."""
    async with opened(SqliteSessionStore(path)) as store:
        head = await stored_sessions.create(store, tenant=TENANT, metadata={})
        keep = Retention()
        for _ in range(MAX_RETAINED + 1):
            head = await commit(store, head, num_floats=4 * NUM_FLOATS, retention=keep)
            keep = Retention(keep=tuple(range(1, head.version + 1)))
        fill_with_other_data(disk)
        await delete(store, head)
        assert (await store.usage(tenant=TENANT)).num_bytes == 0


STATE_FLOATS = 945_000  # 3.78 MB, the bundled model's: two of them do not fit beside a write-ahead log of 4 MiB


async def fill_with_states(store: SqliteSessionStore) -> list[SessionHead]:
    heads: list[SessionHead] = []
    with pytest.raises(StorageFull):
        for number in range(100):
            head = await stored_sessions.create(store, f"s{number}", tenant=TENANT, metadata={})
            heads.append(await commit(store, head, num_floats=STATE_FLOATS))
    return heads


async def commit_turns(store: SqliteSessionStore, head: SessionHead, num_turns: int) -> SessionHead:
    for _ in range(num_turns):
        head = await commit(store, head, num_floats=STATE_FLOATS)
        await store.check_writable()
    return head


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_after_a_full_disk_deleting_makes_the_sessions_that_are_left_go_on(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_states(store)
        for head in heads[:2]:
            await delete(store, head)
        heads = [await commit_turns(store, head, 3) for head in heads[2:]]
        for head in heads:
            await delete(store, head)
        new = await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        new = await commit_turns(store, new, 4)
    async with opened(SqliteSessionStore(path)) as store:
        await commit_turns(store, new, 2)


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_sessions_continue_on_a_full_disk_and_restarts_do_not_use_up_the_ballast(path: Path) -> None:
    """Their next state takes the place of the one before: the database does not grow."""
    ballast = path.with_name("sessions.db-ballast")
    num_fit = []
    for _ in range(2):
        async with opened(SqliteSessionStore(path)) as store:
            heads = await fill_with_states(store)
            num_fit.append(len(heads))
            for head in heads:
                await commit_turns(store, head, 2)
            assert ballast.stat().st_size >= BALLAST_BYTES - SLACK_BYTES
            for head in (await store.list(tenant=TENANT, limit=100)).heads:
                await delete(store, head)
    assert num_fit[0] == num_fit[1] >= 5


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_a_full_disk_refuses_new_sessions_until_the_ballast_can_be_made_again(disk: Path, path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_states(store)
    async with opened(SqliteSessionStore(path)) as store:  # its write-ahead log is empty
        fill_with_other_data(disk)
        head = await commit(store, heads[0], num_floats=STATE_FLOATS, new_ids=tuple(range(30_000)))
        assert path.with_name("sessions.db-ballast").stat().st_size < BALLAST_BYTES  # the token log took some
        with pytest.raises(StorageFull, match="delete sessions, or free its disk") as refused:
            await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        assert str(path) in refused.value.with_notes()
        await commit_turns(store, head, 3)
        (disk / "other").unlink()
        await delete(store, heads[1])
        await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        assert path.with_name("sessions.db-ballast").stat().st_size == BALLAST_BYTES


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_a_commit_on_a_full_disk_adds_no_older_snapshot(disk: Path, path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        head = (await fill_with_states(store))[0]
        fill_with_other_data(disk)
        retention = Retention(keep=(head.version,))
        assert (await commit(store, head, num_floats=STATE_FLOATS, retention=retention)).version == 2
        assert await store.list_retained(head.key) == ()


class FullDisk:
    """Work that finds no room `num_failures` times, and notes whether the log is empty and the ballast there."""

    def __init__(self, path: Path, num_failures: int) -> None:
        self._path = path
        self._num_failures = num_failures
        self.seen: list[tuple[bool, bool]] = []

    def __call__(self, connection: sqlite3.Connection) -> str:
        log, ballast = (self._path.with_name(f"{self._path.name}-{name}") for name in ("wal", "ballast"))
        self.seen.append((log.stat().st_size == 0, ballast.stat().st_size > 0))
        if len(self.seen) <= self._num_failures:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return "done"


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_work_that_finds_no_room_runs_again_with_an_empty_log_and_without_the_ballast(
    tmp_path: Path, num_failures: int
) -> None:
    path = tmp_path / "sessions.db"
    work = FullDisk(path, num_failures)
    async with opened(SqliteSessionStore(path)) as store:
        await stored_sessions.create(store, tenant=TENANT, metadata={})
        if num_failures == 2:
            with pytest.raises(StorageFull):
                await store.database.write(work)
        else:
            assert await store.database.write(work) == "done"
        assert work.seen == [(False, True), (True, False)][: num_failures + 1]
        new = FullDisk(path, 1)
        with pytest.raises(StorageFull):
            await store.database.write_new(new)
        assert [has_ballast for _, has_ballast in new.seen] == [True]
        assert path.with_name("sessions.db-ballast").stat().st_size == BALLAST_BYTES


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_X29_all_versions_of_a_state_can_be_deleted_from_a_full_disk_and_sessions_go_on(path: Path) -> None:
    """Together they take more to overwrite than the ballast has."""
    state = NewState(file=bytes(4 * STATE_FLOATS), model_fingerprint="f", position=1, num_tokens=1, source="text")
    async with opened(SqliteSessionStore(path)) as store:
        states = SqliteStateStore(store)
        head = await commit_turns(store, await stored_sessions.create(store, tenant=TENANT, metadata={}), 1)
        num_states = 0
        with pytest.raises(StorageFull):
            while num_states < 100:
                await states.add(tenant=TENANT, name="rules", state=state)
                num_states += 1
        assert 4 * STATE_FLOATS * num_states > BALLAST_BYTES
        head = await commit_turns(store, head, 2)
        assert await states.delete(tenant=TENANT, name="rules") == num_states
        await states.add(tenant=TENANT, name="rules", state=state)
        await commit_turns(store, head, 2)
