"""Snapshots that come after their commits, and the log from there, in every store."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsm_core.errors import LogCorrupt, NotFound
from service.stores.sessions.base import (
    KnownVersion,
    LateSnapshot,
    LogMark,
    LogTail,
    NewSession,
    Rewind,
    SessionHead,
    SessionStore,
)
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.retention import Retention
from service.stores.sessions.transitions import SnapshotMark
from tests.support.redis_servers import RedisClock
from tests.support.snapshots import make_snapshot
from tests.support.stored_rows import LOG_OF_ONE, VERSION, execute
from tests.support.stored_sessions import Clock, acquire, commit, commit_log, create

KEY = SessionKey("a", "s1")


def late(head: SessionHead, version: int, *, position: int | None = None, **fields: Any) -> LateSnapshot:
    """The state of a session of turns of 3 tokens, all fed, at an earlier version."""
    raw = make_snapshot(session_id=head.session_id, version=version).encode()
    position = 3 * version if position is None else position
    return LateSnapshot(created_at=head.created_at, version=version, position=position, snapshot=raw, **fields)


async def log_turns(store: SessionStore, num_turns: int, *, session_id: str = "s1", **fields: Any) -> SessionHead:
    head = await create(store, session_id, **fields)
    for turn in range(num_turns):
        head = await commit_log(store, head, new_ids=(10 * turn, 10 * turn + 1, 10 * turn + 2))
    return head


async def test_a_commit_without_a_snapshot_moves_log_and_head_alone(store: SessionStore) -> None:
    head = await commit(store, await create(store), new_ids=(1, 2, 3))
    newest = await commit_log(
        store, head, new_ids=(4, 5), num_fed=1, tokenizer_fingerprint="t1", numerics="n", energy_joules=0.1
    )
    assert (newest.version, newest.position, newest.num_log_tokens) == (2, 4, 5)
    assert (newest.snapshot_version, newest.snapshot_position, newest.snapshot_bytes) == (1, 3, head.snapshot_bytes)
    assert (newest.tokenizer_fingerprint, newest.numerics, newest.energy_joules) == ("t1", "n", 0.1)
    assert await store.get(KEY) == newest
    tail = LogTail((4, 5), (LogMark(version=2, num_log_tokens=5, num_sampled=1, seed=7),))
    stored = await store.load(KEY)
    assert (stored.head, stored.snapshot, stored.tail) == (newest, make_snapshot(version=1).encode(), tail)
    assert (await acquire(store)).stored == stored
    assert (await store.usage(tenant="a")).num_bytes == head.snapshot_bytes + 4 * 5


async def test_a_session_without_any_snapshot_is_loaded_with_its_whole_log(store: SessionStore) -> None:
    head = await log_turns(store, 2)
    assert (head.snapshot_version, head.snapshot_position, head.snapshot_bytes) == (0, 0, 0)
    for stored in (await store.load(KEY), (await acquire(store)).stored):
        assert (stored.snapshot, stored.damage) == (None, None)
        assert stored.tail is not None
        assert stored.tail.ids == (0, 1, 2, 10, 11, 12)
        assert [(mark.version, mark.num_log_tokens) for mark in stored.tail.marks] == [(1, 3), (2, 6)]


async def test_the_pending_token_of_a_snapshot_is_the_tail_of_its_log(store: SessionStore) -> None:
    head = await create(store)
    raw = make_snapshot(version=1).encode()
    head = await commit(store, head, snapshot=raw, new_ids=(1, 2, 3), num_fed=2)
    assert (await store.load(KEY)).tail == LogTail((3,))
    await commit_log(store, head, new_ids=(4, 5))
    tail = (await store.load(KEY)).tail
    assert tail is not None
    assert (tail.ids, [mark.version for mark in tail.marks]) == ((3, 4, 5), [2])


async def test_a_late_snapshot_becomes_the_newest_and_moves_nothing_else(store: SessionStore) -> None:
    head = await log_turns(store, 3)
    put = await store.put_snapshot(KEY, late(head, 2))
    size = len(make_snapshot(version=2).encode())
    expected = dataclasses.replace(head, snapshot_version=2, snapshot_position=6, snapshot_bytes=size)
    assert put == expected == await store.get(KEY)
    stored = await store.load(KEY)
    assert (stored.snapshot, stored.tail and stored.tail.ids) == (make_snapshot(version=2).encode(), (20, 21, 22))
    assert (await store.usage(tenant="a")).num_bytes == size + 4 * 9
    assert await store.load_retained(KEY, version=2) == stored.snapshot
    assert await store.list_retained(KEY) == ()


async def test_a_late_snapshot_needs_no_lease_and_disturbs_no_holder(store: SessionStore) -> None:
    head = await log_turns(store, 2)
    lease = (await acquire(store)).lease
    assert await store.put_snapshot(KEY, late(head, 2)) is not None
    newest = await commit_log(store, head, lease=lease)
    assert (newest.version, newest.snapshot_version, newest.snapshot_position) == (3, 2, 6)


@pytest.mark.parametrize(
    ("version", "position"), [(1, 3), (2, 6), (4, 12), (3, 5), (3, 7)], ids=["older", "equal", "future", "-4", "+1"]
)
async def test_a_late_snapshot_that_is_not_newer_or_not_of_the_log_is_refused(
    store: SessionStore, version: int, position: int
) -> None:
    head = await log_turns(store, 3)
    head = await store.put_snapshot(KEY, late(head, 2)) or head
    assert (version, position) == (2, 6) or await store.put_snapshot(
        KEY, late(head, version, position=position)
    ) is None
    assert await store.get(KEY) == head
    assert (await store.load(KEY)).snapshot == make_snapshot(version=2).encode()


async def test_a_late_snapshot_of_a_turn_that_a_rewind_cut_off_is_refused(store: SessionStore) -> None:
    head = await log_turns(store, 3)
    lease = (await acquire(store)).lease
    fields: dict[str, Any] = {"model_fingerprint": "m1", "num_sampled": 0, "seed": 7, "position": 4}
    raw = make_snapshot(version=4).encode()
    rewound = await store.rewind(lease, Rewind(expected_version=3, snapshot=raw, num_log_tokens=4, **fields))
    assert (rewound.snapshot_version, rewound.snapshot_position) == (4, 4)
    for version in (1, 2, 3):
        assert await store.put_snapshot(KEY, late(head, version)) is None
    newest = await commit_log(store, rewound)
    assert await store.put_snapshot(KEY, late(head, 3)) is None
    assert await store.get(KEY) == newest


async def test_a_late_snapshot_of_another_incarnation_or_of_none_is_refused(store: SessionStore) -> None:
    head = await log_turns(store, 2)
    await store.delete(KEY)
    with pytest.raises(NotFound):
        await store.get(KEY)
    assert await store.put_snapshot(KEY, late(head, 2)) is None
    successor = await log_turns(store, 2)
    assert await store.put_snapshot(KEY, late(head, 2)) is None
    assert await store.get(KEY) == successor


async def test_a_late_snapshot_may_keep_the_one_before_it(store: SessionStore) -> None:
    head = await log_turns(store, 4)
    for version, keep in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (2,))):
        await store.put_snapshot(KEY, late(head, version, retention=Retention(keep=keep)))
        assert tuple(one.version for one in await store.list_retained(KEY)) == keep
    assert await store.load_retained(KEY, version=2) == make_snapshot(version=2).encode()
    sizes = [len(make_snapshot(version=version).encode()) for version in (2, 4)]
    assert (await store.usage(tenant="a")).num_bytes == sum(sizes) + 4 * 12


async def test_L6_a_late_snapshot_is_put_to_its_own_tenants_session_alone(store: SessionStore) -> None:
    head = await log_turns(store, 2)
    other = await log_turns(store, 2, tenant="b")
    await store.put_snapshot(KEY, late(head, 2))
    assert await store.get(other.key) == other


async def test_a_late_snapshot_lives_as_long_as_its_session(store: SessionStore, clock: Clock | RedisClock) -> None:
    head = await log_turns(store, 2, ttl_s=100.0)
    clock.advance(90.0)
    await store.put_snapshot(KEY, late(head, 2))
    assert (await store.load(KEY)).snapshot is not None
    clock.advance(20.0)
    with pytest.raises(NotFound):
        await store.load(KEY)


async def test_a_known_version_is_leased_without_its_snapshot(store: SessionStore) -> None:
    head = await commit_log(store, await commit(store, await create(store)))
    known = KnownVersion(head.created_at, head.version)
    leased = await acquire(store, known=known)
    assert (leased.is_known, leased.stored.head, leased.stored.snapshot) == (True, head, None)
    assert leased.stored.tail is None  # the state that the caller has is behind it
    newest = await commit_log(store, head, lease=leased.lease)
    for other in (known, KnownVersion(head.created_at - 1.0, newest.version)):
        leased = await acquire(store, known=other)
        assert (leased.is_known, leased.stored.snapshot) == (False, make_snapshot(version=1).encode())
        await store.release(leased.lease)


async def test_a_session_may_begin_with_a_log_and_an_older_snapshot(store: SessionStore) -> None:
    marks = tuple(LogMark(version=n, num_log_tokens=3 * n, num_sampled=1, seed=4) for n in (1, 2))
    fields: dict[str, Any] = {"model_fingerprint": "m1", "metadata": {}, "version": 2, "position": 6, "marks": marks}
    origin: dict[str, Any] = {"tokenizer_fingerprint": "t", "numerics": "n", "energy_joules": 2.5}
    raw = make_snapshot(version=1).encode()
    head = await store.create(
        NewSession(
            key=KEY, snapshot=raw, snapshot_mark=SnapshotMark(1, 3), log_ids=(1, 2, 3, 4, 5, 6), **fields, **origin
        )
    )
    assert (head.snapshot_version, head.snapshot_position, head.snapshot_bytes) == (1, 3, len(raw))
    assert (head.tokenizer_fingerprint, head.numerics, head.energy_joules) == ("t", "n", 2.5)
    stored = await store.load(KEY)
    assert (stored.head, stored.snapshot, stored.tail) == (head, raw, LogTail((4, 5, 6), marks[1:]))
    bare = await store.create(NewSession(key=SessionKey("a", "s2"), log_ids=(1, 2, 3, 4, 5, 6), **fields))
    assert (bare.snapshot_version, (await store.load(bare.key)).tail) == (0, LogTail((1, 2, 3, 4, 5, 6), marks))


async def damage_second_turn(store: SessionStore) -> None:
    if isinstance(store, RedisSessionStore):
        await store.client.command("LSET", store.keys.session(KEY).log, 1, bytes(20))
    else:
        await execute(store, f"UPDATE log_chunks SET ids = zeroblob(12) WHERE {LOG_OF_ONE} AND {VERSION} = 2", *KEY)


async def test_R3_a_tail_that_is_damaged_is_refused(store: SessionStore) -> None:
    head = await log_turns(store, 3)
    await store.put_snapshot(KEY, late(head, 1))
    await damage_second_turn(store)
    for call in (store.load(KEY), acquire(store)):
        with pytest.raises(LogCorrupt):
            await call
