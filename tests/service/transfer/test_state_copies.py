"""Named states in backups and copies: versions, tenants, published ones, damage, and a restore that is killed."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nsm_core.errors import SnapshotCorrupt
from service.named_states.library import new_state
from service.state.copies import read_copy
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.states.base import PUBLISHED, StateStore, StoredState
from service.stores.states.factory import states_beside
from service.transfer import archive
from service.transfer.archive import ArchiveDamaged
from service.transfer.backup import TransferResult, all_sessions, backup, copy_sessions, restore
from service.transfer.session_file import SessionFile, read_file, write_file
from service.transfer.state_copies import all_states
from tests.service.transfer.restore_process import open_store
from tests.support.counts import scaled
from tests.support.redis_servers import Topology, own_prefix
from tests.support.stored_sessions import Clock, commit, create, opened

REPOSITORY = Path(__file__).parents[3]
KINDS = ["memory", "sqlite", pytest.param("redis_single", marks=pytest.mark.redis)]
WRITTEN = [
    ("a", "state rules@1", "written"),
    ("a", "state rules@3", "written"),
    ("a", "state shared@1", "written"),
    ("b", "state rules@1", "written"),
    (PUBLISHED, "state shared@1", "written"),
]


def store_named(request: pytest.FixtureRequest, path: Path) -> SessionStore:
    if request.param == "memory":
        return SqliteSessionStore(None, clock=Clock())
    if request.param == "sqlite":
        return SqliteSessionStore(path)
    topology: Topology = request.getfixturevalue(request.param)
    return RedisSessionStore(parse_redis_url(topology.url_with(prefix=own_prefix())))


@pytest.fixture(params=KINDS)
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with opened(store_named(request, tmp_path / "source.db")) as store:
        await fill(store)
        yield store


@pytest.fixture(params=KINDS)
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    async with opened(store_named(request, tmp_path / "target.db")) as store:
        yield store


async def state_file(version: int) -> SessionFile:
    async with opened(SqliteSessionStore(None, clock=Clock())) as store:
        head = await create(store)
        for _ in range(version):
            head = await commit(store, head)
        return read_file(write_file(await read_copy(store, head.key), tokenizer_fingerprint="t1"))


async def add(states: StateStore, tenant: str, name: str, *, turns: int = 1, text: str | None = None) -> None:
    state = new_state(tenant, name, await state_file(turns), source="text", text=text, metadata={"é": "ö"})
    await states.add(tenant=tenant, name=name, state=state)


async def fill(store: SessionStore) -> None:
    """States of two tenants and of the operator: one of three versions deleted, a name that was published later."""
    states = states_beside(store)
    for turns in (1, 2, 3, 4):
        await add(states, "a", "rules", turns=turns, text=f"ü{turns}")
    for version in (2, 4):
        await states.delete(tenant="a", name="rules", version=version)
    await add(states, "a", "shared")
    await add(states, "b", "rules")
    await add(states, PUBLISHED, "shared", turns=2)


async def contents(store: SessionStore) -> list[StoredState]:
    states = states_beside(store)
    heads = await all_states(states)
    stored = [await states.load(tenant=head.tenant, name=head.name, version=head.version) for head in heads]
    return [one for one in stored if one is not None]


async def outcomes_of(steps: AsyncIterator[TransferResult]) -> list[tuple[str, str, str]]:
    return [(result.name.tenant, result.name.session_id, result.outcome) async for result in steps]


async def write_backup(store: SessionStore, path: Path) -> bytes:
    assert await outcomes_of(backup(store, await all_sessions(store), path)) == WRITTEN
    return path.read_bytes()


def with_outcome(outcome: str) -> list[tuple[str, str, str]]:
    return [(tenant, name, outcome) for tenant, name, _ in WRITTEN]


async def test_a_backup_brings_every_version_into_any_store(
    source: SessionStore, target: SessionStore, tmp_path: Path
) -> None:
    raw = await write_backup(source, tmp_path / "b")
    assert await outcomes_of(restore(target, io.BytesIO(raw))) == WRITTEN
    assert await contents(target) == await contents(source)
    assert await outcomes_of(restore(target, io.BytesIO(raw))) == with_outcome("same")
    await add(states_beside(target), "a", "rules")  # no number that the name had is given again
    newest = await states_beside(target).get(tenant="a", name="rules")
    assert newest is not None
    assert newest.version == 5


async def test_a_copy_brings_every_version_into_any_store(source: SessionStore, target: SessionStore) -> None:
    assert await outcomes_of(copy_sessions(source, target, [])) == WRITTEN
    assert await contents(target) == await contents(source)
    assert await outcomes_of(copy_sessions(source, target, [])) == with_outcome("same")


async def test_another_content_of_a_version_stays_whatever_is_asked_for(
    source: SessionStore, target: SessionStore, tmp_path: Path
) -> None:
    raw, states = await write_backup(source, tmp_path / "b"), states_beside(target)
    await add(states, "a", "rules", turns=5)
    before = await contents(target)
    for is_overwriting, rest in ((False, "written"), (True, "same")):
        found = await outcomes_of(restore(target, io.BytesIO(raw), is_overwriting=is_overwriting))
        assert found == [("a", "state rules@1", "exists"), *with_outcome(rest)[1:]]
    assert (await contents(target))[:1] == before


async def test_one_tenants_states_alone_and_published_ones_alone(tmp_path: Path) -> None:
    async with opened(SqliteSessionStore(None)) as source, opened(SqliteSessionStore(None)) as target:
        await fill(source)
        raw = await write_backup(source, tmp_path / "b")
        assert await outcomes_of(restore(target, io.BytesIO(raw), tenant="b")) == WRITTEN[3:4]
        assert await outcomes_of(copy_sessions(source, target, [], tenant=PUBLISHED)) == WRITTEN[4:]
        # a name that is published here meanwhile, of a tenant that has no version of it here
        steps = [result async for result in restore(target, io.BytesIO(raw), tenant="a")]
        assert [result.outcome for result in steps] == ["written", "written", "failed"]
        assert "published" in str(steps[-1].error)


async def test_a_damaged_state_fails_alone_and_a_backup_repairs_it_on_request(tmp_path: Path) -> None:
    async with opened(SqliteSessionStore(tmp_path / "s.db")) as store:
        await fill(store)
        raw, whole = await write_backup(store, tmp_path / "b"), await contents(store)
    with sqlite3.connect(tmp_path / "s.db") as connection:
        connection.execute("UPDATE named_states SET file = zeroblob(200) WHERE tenant = 'b'")
    connection.close()
    async with opened(SqliteSessionStore(tmp_path / "s.db")) as store, opened(SqliteSessionStore(None)) as target:
        failed = ("b", "state rules@1", "failed")
        expected = [*WRITTEN[:3], failed, *WRITTEN[4:]]
        assert await outcomes_of(backup(store, [], tmp_path / "later")) == expected
        assert await outcomes_of(copy_sessions(store, target, [])) == expected
        same = with_outcome("same")
        assert await outcomes_of(restore(store, io.BytesIO(raw))) == [*same[:3], failed, *same[4:]]
        found = await outcomes_of(restore(store, io.BytesIO(raw), is_overwriting=True))
        assert found == [*same[:3], ("b", "state rules@1", "replaced"), *same[4:]]
        assert await contents(store) == whole


async def test_P13_wherever_a_backup_is_damaged_only_whole_states_are_restored(tmp_path: Path) -> None:
    async with opened(SqliteSessionStore(None)) as source:
        await fill(source)
        raw, whole = await write_backup(source, tmp_path / "b"), await contents(source)
    for offset in range(0, len(raw), scaled(127, 41)):
        changed = bytearray(raw)
        changed[offset] ^= 0x20
        for damaged in (bytes(changed), raw[:offset]):
            async with opened(SqliteSessionStore(None)) as target:
                with pytest.raises(ArchiveDamaged, match="no backup that can be used"):
                    await outcomes_of(restore(target, io.BytesIO(damaged)))
                restored = await contents(target)
                assert restored == whole[: len(restored)]


async def test_a_state_under_another_name_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup with good checksums whose fields are not those of the bytes."""
    encode = archive.encode_state
    monkeypatch.setattr(archive, "encode_state", lambda copy: ({**encode(copy)[0], "name": "other"}, encode(copy)[1]))
    async with opened(SqliteSessionStore(None)) as source, opened(SqliteSessionStore(None)) as target:
        await fill(source)
        raw = await write_backup(source, tmp_path / "b")
        with pytest.raises(ArchiveDamaged, match="its file is another state's"):
            await outcomes_of(restore(target, io.BytesIO(raw)))
        assert await contents(target) == []


async def test_a_backup_of_format_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "FORMAT_VERSION", 1)
    async with opened(SqliteSessionStore(None)) as source, opened(SqliteSessionStore(None)) as target:
        await commit(source, await create(source, tenant="default"))
        await outcomes_of(backup(source, await all_sessions(source), tmp_path / "b"))
        monkeypatch.undo()
        raw = (tmp_path / "b").read_bytes()
        assert raw[8:12] == b"\x01\0\0\0"
        assert await outcomes_of(restore(target, io.BytesIO(raw))) == [("default", "s1", "written")]


@pytest.mark.redis
async def test_states_in_redis_that_do_not_tell_their_tenant_are_found_by_its_sessions(redis_single: Topology) -> None:
    """Older builds stored the bytes alone, under keys with a hash of the tenant."""
    prefix = own_prefix()
    async with opened(RedisSessionStore(parse_redis_url(redis_single.url_with(prefix=prefix)))) as store:
        states = states_beside(store)
        await add(states, "a", "rules")
        await add(states, PUBLISHED, "shared")
        with redis_single.servers[0].client() as client:
            assert [client.hdel(key, "tenant") for key in client.scan_iter(f"{prefix}:*:state:*")] == [1, 1]
        with pytest.raises(SnapshotCorrupt, match="do not name their tenant"):
            await states.list_tenants()
        await create(store, tenant="a")
        assert await states.list_tenants() == ("a", PUBLISHED)


@pytest.mark.parametrize("num_whole", [1, 3])
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def test_a_restore_that_is_killed_can_be_done_again(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, num_whole: int
) -> None:
    """With the states it said it had written, and no part of the one whose bytes it was reading."""
    async with opened(SqliteSessionStore(None)) as source:
        await fill(source)
        raw, whole = await write_backup(source, tmp_path / "b"), await contents(source)
    starts = [at for at in range(len(raw)) if raw.startswith(b"STAT", at)]
    name = str(tmp_path / "target.db")
    if kind == "redis":
        name = request.getfixturevalue("redis_single").own_url()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.service.transfer.restore_process", name),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(raw[: starts[num_whole] + 100])
    await process.stdin.drain()
    lines = [(await process.stdout.readline()).decode().split() for _ in range(num_whole)]
    assert [line[-1] for line in lines] == ["written"] * num_whole
    process.kill()
    await process.wait()
    async with opened(open_store(name)) as target:
        assert await contents(target) == whole[:num_whole]
        found = await outcomes_of(restore(target, io.BytesIO(raw)))
        assert found == [*with_outcome("same")[:num_whole], *WRITTEN[num_whole:]]
        assert await contents(target) == whole
