from __future__ import annotations

import dataclasses
import errno
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import SnapshotCorrupt, StorageFull
from service.state.copies import SessionCopy, read_copy
from service.stores.records.factory import records_beside
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import NewSession, Rewind, SessionHead, SessionStore, StoredSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.archive import ArchiveDamaged
from service.transfer.backup import TransferResult, all_sessions, backup, copy_sessions, restore, restore_session
from tests.support.counts import scaled
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.redis_servers import Topology, own_prefix
from tests.support.responses import counts_of, get, respond
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import Clock, acquire, commit, commit_log, create

KINDS = ["memory", "sqlite", pytest.param("redis_single", marks=pytest.mark.redis)]


@pytest.fixture(params=KINDS)
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = make_store(request, tmp_path / "source.db")
    await store.open()
    yield store
    await store.close()


@pytest.fixture(params=KINDS)
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = make_store(request, tmp_path / "target.db")
    await store.open()
    yield store
    await store.close()


def make_store(request: pytest.FixtureRequest, path: Path) -> SessionStore:
    if request.param == "memory":
        return SqliteSessionStore(None, clock=Clock())
    if request.param == "sqlite":
        return SqliteSessionStore(path, clock=Clock())
    topology: Topology = request.getfixturevalue(request.param)
    return RedisSessionStore(parse_redis_url(topology.url_with(prefix=own_prefix())))


async def fill(store: SessionStore) -> None:
    """Sessions of two tenants: of several turns, with newer turns than their snapshot, rewound, with a TTL, empty.

    As in a server's store, states that turns left are packed, and the one of the rewind is not.
    """
    for tenant in ("a", "b"):
        head = await create(store, "s1", tenant=tenant)
        for _ in range(3):
            head = await turn(store, head)
    await commit_log(store, head)
    head = await turn(store, await create(store, "s2", metadata={"é": "ö"}, ttl_s=5_000.0))
    lease = (await acquire(store, "s2")).lease
    state: dict[str, Any] = {
        "snapshot": own_snapshot(head, version=2, position=2, is_packed=False),
        "model_fingerprint": "m1",
        "tokenizer_fingerprint": "t1",
        "numerics": "cpu",
        "position": 2,
    }
    await store.rewind(lease, Rewind(expected_version=1, **state, num_log_tokens=2, num_sampled=0, seed=7))
    await create(store, "s3")


async def turn(store: SessionStore, head: SessionHead, *, is_packed: bool = True) -> SessionHead:
    snapshot = own_snapshot(head, version=head.version + 1, position=head.position + 3, is_packed=is_packed)
    return await commit(store, head, snapshot=snapshot)


def own_snapshot(head: SessionHead, *, version: int, position: int, is_packed: bool) -> bytes:
    names = {"tenant": head.tenant, "session_id": head.session_id}
    return make_snapshot(**names, version=version, position=position).encode(is_packed=is_packed)


async def contents(store: SessionStore) -> list[tuple[Any, ...]]:
    """All that a store holds, in the order of its listing, less its own times."""
    copies = [await read_copy(store, name) for name in await all_sessions(store)]
    times: dict[str, Any] = {"created_at": 0.0, "updated_at": 0.0, "expires_at": None}
    return [(dataclasses.replace(copy.head, **times), copy.snapshot, copy.log_ids, copy.marks) for copy in copies]


async def outcomes_of(steps: AsyncIterator[TransferResult]) -> list[tuple[str, str, str]]:
    return [(result.name.tenant, result.name.session_id, result.outcome) async for result in steps]


async def write_backup(store: SessionStore, path: Path) -> bytes:
    assert {outcome for *_, outcome in await outcomes_of(backup(store, await all_sessions(store), path))} == {"written"}
    return path.read_bytes()


async def test_a_backup_brings_every_session_into_any_store(
    source: SessionStore, target: SessionStore, tmp_path: Path
) -> None:
    await fill(source)
    raw = await write_backup(source, tmp_path / "b")
    written = [("a", "s1", "written"), ("a", "s2", "written"), ("a", "s3", "written"), ("b", "s1", "written")]
    assert await outcomes_of(restore(target, io.BytesIO(raw))) == written
    assert await contents(target) == await contents(source)
    again = await outcomes_of(restore(target, io.BytesIO(raw)))
    assert again == [(tenant, session_id, "same") for tenant, session_id, _ in written]


async def test_a_copy_brings_every_session_into_any_store(source: SessionStore, target: SessionStore) -> None:
    await fill(source)
    names = await all_sessions(source)
    assert {outcome for *_, outcome in await outcomes_of(copy_sessions(source, target, names))} == {"written"}
    assert await contents(target) == await contents(source)
    assert {outcome for *_, outcome in await outcomes_of(copy_sessions(source, target, names))} == {"same"}
    await turn(target, await target.get(SessionKey("a", "s3")))  # what was copied goes on


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_overwriting", [False, True])
async def test_a_session_is_the_same_whether_its_state_is_packed_or_not(is_packed: bool, is_overwriting: bool) -> None:
    source, target = SqliteSessionStore(None, clock=Clock()), SqliteSessionStore(None, clock=Clock())
    await turn(source, await create(source), is_packed=is_packed)
    await turn(target, await create(target), is_packed=not is_packed)
    before = await contents(target)
    steps = copy_sessions(source, target, await all_sessions(source), is_overwriting=is_overwriting)
    assert await outcomes_of(steps) == [("a", "s1", "same")]
    assert await contents(target) == before


async def test_a_session_that_went_on_is_replaced_only_on_request(tmp_path: Path) -> None:
    store = SqliteSessionStore(None, clock=Clock())
    await fill(store)
    before, raw = await contents(store), await write_backup(store, tmp_path / "b")
    await turn(store, await store.get(SessionKey("a", "s3")))
    after = await contents(store)
    assert ("a", "s3", "exists") in await outcomes_of(restore(store, io.BytesIO(raw)))
    assert await contents(store) == after
    found = await outcomes_of(restore(store, io.BytesIO(raw), is_overwriting=True))
    assert [outcome for *_, outcome in found] == ["same", "same", "replaced", "same"]
    assert sorted(await contents(store), key=str) == sorted(before, key=str)


async def test_one_tenants_sessions_alone(tmp_path: Path) -> None:
    source, target = SqliteSessionStore(None, clock=Clock()), SqliteSessionStore(None, clock=Clock())
    await fill(source)
    raw = await write_backup(source, tmp_path / "b")
    assert await outcomes_of(restore(target, io.BytesIO(raw), tenant="b")) == [("b", "s1", "written")]
    assert await target.list_tenants() == ("b",)
    assert [name.session_id for name in await all_sessions(source, tenant="a")] == ["s1", "s2", "s3"]


async def test_a_session_without_any_snapshot_is_backed_up_with_its_log_alone(tmp_path: Path) -> None:
    source, target = SqliteSessionStore(None, clock=Clock()), SqliteSessionStore(None, clock=Clock())
    head = await commit_log(source, await create(source, "s1"), energy_joules=1.5)
    await commit_log(source, head, num_fed=2, energy_joules=2.5)
    raw = await write_backup(source, tmp_path / "b")
    assert await outcomes_of(restore(target, io.BytesIO(raw))) == [("a", "s1", "written")]
    assert await contents(target) == await contents(source)
    assert (await target.get(head.key)).energy_joules == 2.5


async def test_P13_wherever_a_backup_is_damaged_only_what_was_whole_before_is_restored(tmp_path: Path) -> None:
    source = SqliteSessionStore(None, clock=Clock())
    await fill(source)
    raw, whole = await write_backup(source, tmp_path / "b"), await contents(source)
    for offset in range(0, len(raw), scaled(53, 7)):
        changed = bytearray(raw)
        changed[offset] ^= 0x20
        for damaged in (bytes(changed), raw[:offset]):
            target = SqliteSessionStore(None, clock=Clock())
            with pytest.raises(ArchiveDamaged, match="no backup that can be used") as caught:
                await outcomes_of(restore(target, io.BytesIO(damaged)))
            restored = await contents(target)
            assert restored == whole[: len(restored)]
            assert caught.value.num_sessions == len(restored)


async def test_what_follows_the_end_of_a_backup_is_noticed(tmp_path: Path) -> None:
    raw = await write_backup_of_nothing(tmp_path / "b")
    with pytest.raises(ArchiveDamaged, match="goes on after its end"):
        await outcomes_of(restore(SqliteSessionStore(None), io.BytesIO(raw + b"x")))


async def write_backup_of_nothing(path: Path) -> bytes:
    assert await outcomes_of(backup(SqliteSessionStore(None), [], path)) == []
    return path.read_bytes()


class DamagedStore(SqliteSessionStore):
    """The state of s2 is not what was stored."""

    async def load(self, key: SessionKey) -> StoredSession:
        if key.session_id == "s2":
            raise SnapshotCorrupt("the checksum does not match")
        return await super().load(key)


async def test_a_session_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    source, target = DamagedStore(None, clock=Clock()), SqliteSessionStore(None, clock=Clock())
    await fill(source)
    names, path = await all_sessions(source), tmp_path / "b"
    await source.delete(SessionKey("a", "s3"))
    expected = [("a", "s1", "written"), ("a", "s2", "failed"), ("a", "s3", "gone"), ("b", "s1", "written")]
    assert await outcomes_of(backup(source, names, path)) == expected
    assert await outcomes_of(copy_sessions(source, target, names)) == expected
    restored = await outcomes_of(restore(target, io.BytesIO(path.read_bytes())))
    assert restored == [("a", "s1", "same"), ("b", "s1", "same")]


async def test_an_interrupted_backup_leaves_the_older_file(tmp_path: Path) -> None:
    store, path = SqliteSessionStore(None, clock=Clock()), tmp_path / "b"
    await fill(store)
    path.write_text("older")
    steps = backup(store, await all_sessions(store), path)
    await anext(steps)
    await steps.aclose()
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


async def test_a_backup_that_finds_no_room_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write does: without a name

    monkeypatch.setattr("service.transfer.backup.os.fsync", fsync)
    with pytest.raises(OSError, match="No space left") as refused:
        await write_backup_of_nothing(tmp_path / "b")
    assert refused.value.filename == str(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


async def test_a_backup_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    await write_backup_of_nothing(tmp_path / "b")
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


class SmallStore(SqliteSessionStore):
    """Has no room for logs of more than `max_log` tokens."""

    max_log = 1_000

    async def create(self, new: NewSession) -> SessionHead:
        if len(new.log_ids) > self.max_log:
            raise StorageFull("no room")
        return await super().create(new)


async def test_what_cannot_be_replaced_stays() -> None:
    source, target = SqliteSessionStore(None, clock=Clock()), SmallStore(None, clock=Clock())
    head = await turn(source, await create(source))
    await turn(target, await create(target))
    await turn(source, head)
    before = await contents(target)
    target.max_log = 3
    with pytest.raises(StorageFull):
        await restore_session(target, await read_copy(source, SessionKey("a", "s1")), is_overwriting=True)
    assert await contents(target) == before


class ForgetfulStore(SqliteSessionStore):
    """Loses the last token of what it is given."""

    async def create(self, new: NewSession) -> SessionHead:
        return await super().create(dataclasses.replace(new, log_ids=(*new.log_ids[:-1], 0) if new.log_ids else ()))


async def test_what_is_read_back_must_be_what_was_written() -> None:
    source = SqliteSessionStore(None, clock=Clock())
    await turn(source, await create(source))
    copy: SessionCopy = await read_copy(source, SessionKey("a", "s1"))
    with pytest.raises(SnapshotCorrupt, match="read back as something else"):
        await restore_session(ForgetfulStore(None, clock=Clock()), copy, is_overwriting=False)


async def test_responses_and_conversations_go_along(tmp_path: Path) -> None:
    source, target = (SqliteSessionStore(tmp_path / name) for name in ("source.db", "target.db"))
    async with gateway(FakeBackend(" It was"), store=source) as server:
        one = await respond(server)
        name = (await server.client.post("/v1/conversations", json={})).json()["id"]
        await respond(server, "one", conversation=name)
    await source.open()
    await target.open()
    raw = await write_backup(source, tmp_path / "b")
    restored = await outcomes_of(restore(target, io.BytesIO(raw)))
    assert {outcome for *_, outcome in restored} == {"written"}
    assert {outcome for *_, outcome in await outcomes_of(restore(target, io.BytesIO(raw)))} == {"same"}
    copied = await outcomes_of(copy_sessions(source, target, await all_sessions(source)))
    assert copied == [(tenant, session_id, "same") for tenant, session_id, _ in restored]
    await records_beside(target).put(
        tenant="default", kind="response", record_id=one["id"], document={}, expected_version=1
    )
    key = ("default", f"response {one['id']}")
    assert (*key, "exists") in await outcomes_of(restore(target, io.BytesIO(raw)))
    assert (*key, "replaced") in await outcomes_of(restore(target, io.BytesIO(raw), is_overwriting=True))
    assert await outcomes_of(restore(target, io.BytesIO(raw), tenant="other")) == []
    await source.close()
    await target.close()
    async with gateway(FakeBackend(" It was"), store=target) as server:
        assert await get(server, one["id"]) == one
        assert counts_of(await respond(server, previous_response_id=one["id"]))[1] > 0
        assert counts_of(await respond(server, "two", conversation=name))[1] > 0
