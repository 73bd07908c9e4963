"""Sessions that nobody uses give up snapshots, in every store."""

from __future__ import annotations

import dataclasses

from service.stores.sessions.base import SessionStore, Shedding
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import Retention
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import acquire, commit, commit_log, create

KEY = SessionKey("a", "s1")
OLDER = Shedding(unused_for_s=0.0, limit=10)
COLD = Shedding(unused_for_s=0.0, limit=10, of_model=("m1", "cpu"))


async def three_turns(store: SessionStore, session_id: str = "s1", **fields: str) -> None:
    """A session with two older snapshots and a newest one."""
    head = await create(store, session_id)
    for _ in range(3):
        keep = tuple(range(1, head.version + 1))
        head = await commit(store, head, retention=Retention(keep=keep), **fields)


async def test_an_unused_session_keeps_its_newest_snapshot_alone(store: SessionStore) -> None:
    await three_turns(store)
    before = await store.load(KEY)
    assert len(await store.list_retained(KEY)) == 2
    assert await store.shed_snapshots(OLDER) == 1
    assert await store.list_retained(KEY) == ()
    assert await store.load_retained(KEY, version=1) is None
    assert await store.load(KEY) == before
    num_bytes = before.head.snapshot_bytes + 4 * before.head.num_log_tokens
    assert (await store.usage(tenant="a")).num_bytes == num_bytes
    assert await store.shed_snapshots(OLDER) == 0


async def test_a_cold_session_keeps_its_log_alone_and_goes_on(store: SessionStore) -> None:
    await three_turns(store)
    before = await store.get(KEY)
    assert await store.shed_snapshots(COLD) == 1
    stored = await store.load(KEY)
    assert (stored.snapshot, stored.damage) == (None, None)
    bare = {"snapshot_version": 0, "snapshot_position": 0, "snapshot_bytes": 0}
    assert stored.head == dataclasses.replace(before, **bare)
    assert stored.tail is not None
    assert stored.tail.ids == (1, 2, 3) * 3
    assert (await store.usage(tenant="a")).num_bytes == 4 * 9
    assert (await store.shed_snapshots(COLD), await store.shed_snapshots(OLDER)) == (0, 0)
    newest = await commit_log(store, await commit(store, stored.head))
    assert (newest.version, newest.snapshot_version) == (5, 4)
    assert (await store.load(KEY)).snapshot == make_snapshot(version=4).encode()


async def test_a_session_of_another_model_or_numerics_keeps_its_newest_snapshot(store: SessionStore) -> None:
    await three_turns(store)
    for model in (("m2", "cpu"), ("m1", "gpu")):
        assert await store.shed_snapshots(dataclasses.replace(COLD, of_model=model)) == 0
    assert (await store.get(KEY)).snapshot_version == 3


async def test_a_session_that_is_used_loses_nothing(store: SessionStore) -> None:
    await three_turns(store)
    assert await store.shed_snapshots(dataclasses.replace(COLD, unused_for_s=3600.0)) == 0
    lease = (await acquire(store)).lease
    assert await store.shed_snapshots(COLD) == 0
    await store.release(lease)
    assert len(await store.list_retained(KEY)) == 2


async def test_no_more_sessions_than_the_limit_lose_snapshots_at_once(store: SessionStore) -> None:
    for session_id in ("s1", "s2", "s3"):
        await three_turns(store, session_id)
    few = dataclasses.replace(OLDER, limit=2)
    assert [await store.shed_snapshots(few) for _ in range(3)] == [2, 1, 0]
