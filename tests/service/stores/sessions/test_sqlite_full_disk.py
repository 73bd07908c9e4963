"""A real file system of a few megabytes, filled to the last byte."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsm_core.errors import NotFound, StorageFull
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import MAX_RETAINED, RetainedSnapshot, Retention
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite.reserve import RESERVE_BYTES, Reserve
from service.stores.sqlite.schema import CHECKPOINT_PAGES, PAGE_BYTES
from tests.service.stores.sessions.test_sqlite import start_writer
from tests.support import stored_sessions
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import commit, opened

TENANT = "default"
NUM_FLOATS = 100_000


@pytest.fixture(params=[8, 40], ids=["8MB", "40MB"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The only thing on it is the store's directory."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


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
    with contextlib.suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)


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
        for head in heads[:3]:
            await delete(store, head)
        created = await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        assert (await commit(store, created, num_floats=NUM_FLOATS)).version == 1
        assert (await store.load(heads[3].key)).head == heads[3]


@pytest.mark.tmpfs
async def test_a_disk_may_be_filled_and_emptied_again_and_again(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        for _ in range(3):
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


async def test_a_store_that_is_open_keeps_room_aside_and_the_last_to_close_it_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    reserve = tmp_path / "sessions.db-reserve"
    async with opened(SqliteSessionStore(path)):
        assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
        async with opened(SqliteSessionStore(path)):
            pass
        assert reserve.stat().st_size == RESERVE_BYTES
    assert [file.name for file in tmp_path.iterdir()] == ["sessions.db"]


async def test_the_write_ahead_log_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    log = tmp_path / "sessions.db-wal"
    async with opened(SqliteSessionStore(path)) as store:
        for number in range(40):
            head = await stored_sessions.create(store, f"s{number}", tenant=TENANT, metadata={})
            await commit(store, head, num_floats=NUM_FLOATS)
            assert log.stat().st_size < 1.3 * CHECKPOINT_PAGES * PAGE_BYTES


def test_where_no_room_can_be_kept_aside_nothing_breaks(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "nowhere" / "sessions.db")
    reserve.fill()
    reserve.give_up()
    reserve.remove()


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_a_session_that_takes_more_than_the_reserve_can_be_deleted_from_a_full_disk(
    disk: Path, path: Path
) -> None:
    """Its newest snapshot and MAX_RETAINED older ones: 15 MB to overwrite."""
    async with opened(SqliteSessionStore(path)) as store:
        head = await stored_sessions.create(store, tenant=TENANT, metadata={})
        keep = Retention()
        for _ in range(MAX_RETAINED + 1):
            head = await commit(store, head, num_floats=4 * NUM_FLOATS, retention=keep)
            raw = make_snapshot(version=head.version, num_floats=4 * NUM_FLOATS).encode()
            joins = RetainedSnapshot(version=head.version, position=head.position, num_bytes=len(raw))
            keep = Retention(keep=tuple(range(1, head.version)), add=joins, snapshot=raw)
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
async def test_sessions_that_fit_go_on_when_the_disk_is_full_and_restarts_do_not_use_up_the_reserve(path: Path) -> None:
    """Their next state takes the place of the one before: the database does not grow."""
    reserve = path.with_name("sessions.db-reserve")
    num_fit = []
    for _ in range(2):
        async with opened(SqliteSessionStore(path)) as store:
            heads = await fill_with_states(store)
            num_fit.append(len(heads))
            for head in heads:
                await commit(store, await commit(store, head, num_floats=STATE_FLOATS), num_floats=STATE_FLOATS)
            assert reserve.stat().st_size == RESERVE_BYTES
            for head in (await store.list(tenant=TENANT, limit=100)).heads:
                await delete(store, head)
    assert num_fit[0] == num_fit[1] >= 5


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_the_store_is_not_writable_from_a_refused_commit_until_one_like_it_fits(path: Path) -> None:
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_states(store)
        for _ in range(2):
            with pytest.raises(StorageFull):
                await store.check_writable()
        await delete(store, heads[0])
        await store.check_writable()
        new = await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        await commit_turns(store, new, 2)


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [48], ids=["48MB"], indirect=True)
async def test_states_larger_than_the_usual_reserve_go_on_and_are_deleted_from_a_full_disk(path: Path) -> None:
    large = 3 * NUM_FLOATS * 10  # 12 MB
    async with opened(SqliteSessionStore(path)) as store:
        head = await stored_sessions.create(store, "large", tenant=TENANT, metadata={})
        head = await commit(store, head, num_floats=large)
    async with opened(SqliteSessionStore(path)) as store:
        await fill_with_sessions(store)
        head = await commit(store, await commit(store, head, num_floats=large), num_floats=large)
        await delete(store, head)
        new = await stored_sessions.create(store, "new", tenant=TENANT, metadata={})
        await commit(store, await commit(store, new, num_floats=large), num_floats=large)


@pytest.mark.tmpfs
@pytest.mark.parametrize("disk", [40], ids=["40MB"], indirect=True)
async def test_a_turn_that_adds_a_little_goes_on_where_only_the_reserve_holds_its_state(path: Path) -> None:
    """2 MB are free beside the reserve: the log of tokens grows, a new state does not fit."""
    async with opened(SqliteSessionStore(path)) as store:
        heads = await fill_with_states(store)
        head = heads[0]
        for _ in range(6):
            head = await commit(store, head, num_floats=STATE_FLOATS, new_ids=tuple(range(8_000)))
        with pytest.raises(StorageFull):
            await create_with_a_state(store, "new")
        assert path.with_name("sessions.db-reserve").stat().st_size == RESERVE_BYTES


async def create_with_a_state(store: SqliteSessionStore, session_id: str) -> None:
    head = await stored_sessions.create(store, session_id, tenant=TENANT, metadata={})
    await commit(store, head, num_floats=STATE_FLOATS)


NO_LIMIT = 2**30 - 1  # pages; newer versions of SQLite have more


class FullDisk:
    """Work that finds no room `num_failures` times, and notes what it finds: a log, a reserve, no limit."""

    def __init__(self, path: Path, num_failures: int) -> None:
        self._path = path
        self._num_failures = num_failures
        self.seen: list[tuple[bool, bool, bool]] = []

    def __call__(self, connection: sqlite3.Connection) -> str:
        (limit,) = connection.execute("PRAGMA max_page_count").fetchone()
        log, reserve = (self._path.with_name(f"{self._path.name}-{name}") for name in ("wal", "reserve"))
        self.seen.append((log.stat().st_size > 0, reserve.stat().st_size > 0, limit >= NO_LIMIT))
        if len(self.seen) <= self._num_failures:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return "done"


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_what_finds_no_room_is_tried_again_with_an_empty_log_and_in_the_reserve(
    tmp_path: Path, num_failures: int
) -> None:
    path = tmp_path / "sessions.db"
    work = FullDisk(path, num_failures)
    async with opened(SqliteSessionStore(path)) as store:
        await stored_sessions.create(store, tenant=TENANT, metadata={})
        if num_failures == 2:
            with pytest.raises(StorageFull):
                await store.write(work)
        else:
            assert await store.write(work) == "done"
        attempts = [(True, True, True), (False, False, False)]
        assert work.seen == attempts[: num_failures + 1]
        after = FullDisk(path, 0)
        await store.write(after)
        assert after.seen == [(num_failures == 0, True, True)]


async def test_a_state_that_was_refused_is_what_the_probe_asks_room_for(tmp_path: Path) -> None:
    async with opened(SqliteSessionStore(tmp_path / "sessions.db", max_bytes=2_000_000)) as store:
        head = await stored_sessions.create(store, tenant=TENANT, metadata={})
        await store.check_writable()
        with pytest.raises(StorageFull):
            await commit(store, head, num_floats=1_000_000)
        with pytest.raises(StorageFull):
            await store.check_writable()
        await stored_sessions.create(store, "small", tenant=TENANT, metadata={})
        with pytest.raises(StorageFull):
            await store.check_writable()
