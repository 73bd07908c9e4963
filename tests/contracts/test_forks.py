"""A fork without a snapshot starts from one of its origin, in every store."""

from __future__ import annotations

import pytest

from service.state.copies import create_copy, read_copy
from service.state.origin import with_origins_snapshot
from service.stores.sessions.base import NewSession, Rewind, SessionHead, SessionStore, Shedding, StoredSession
from service.stores.sessions.key import SessionKey
from tests.support.committed_sessions import commit_turns
from tests.support.fakes import FakeBackend, state_after
from tests.support.stored_sessions import acquire, commit, commit_log

ORIGIN, FORK = SessionKey("a", "s1"), SessionKey("a", "s2")


async def fork(store: SessionStore, key: SessionKey = FORK, *, of: SessionKey = ORIGIN) -> SessionHead:
    """As a fork at the end of its origin is made: the log alone is copied."""
    copy = await read_copy(store, of, with_snapshot=False)
    origin = f"{of.session_id}@{copy.head.position}"
    return await create_copy(store, copy, key, metadata={}, ttl_s=None, forked_from=origin)


async def borrowed(store: SessionStore, key: SessionKey = FORK) -> StoredSession:
    return await with_origins_snapshot(store, await store.load(key))


def assert_borrowed(stored: StoredSession, head: SessionHead) -> None:
    """The fork's own state, with the log from there."""
    assert stored.decoded is not None
    snapshot, tail = stored.decoded, stored.tail
    assert (snapshot.header.tenant, snapshot.header.session_id) == (head.tenant, head.session_id)
    assert (snapshot.header.version, snapshot.header.position) == (
        stored.head.snapshot_version,
        stored.head.snapshot_position,
    )
    assert tail is not None
    assert snapshot.header.position + len(tail.ids) == head.num_log_tokens


async def test_a_fork_copies_its_log_alone_and_borrows_the_snapshot(store: SessionStore) -> None:
    origin = await commit_turns(store, FakeBackend())
    before = (await store.usage(tenant="a")).num_bytes
    head = await fork(store)
    assert (await store.usage(tenant="a")).num_bytes - before == 4 * origin.num_log_tokens
    assert (head.version, head.position, head.snapshot_version) == (origin.version, origin.position, 0)
    stored = await borrowed(store)
    assert_borrowed(stored, head)
    log = await store.read_log(FORK)
    assert stored.decoded is not None
    assert stored.decoded.state == state_after(log[: head.position])


async def test_a_fork_of_a_fork_borrows_from_where_both_come_from(store: SessionStore) -> None:
    await commit_turns(store, FakeBackend())
    await fork(store)
    key = SessionKey("a", "s3")
    head = await fork(store, key, of=FORK)
    assert_borrowed(await borrowed(store, key), head)


async def test_a_fork_outlives_its_origin(store: SessionStore) -> None:
    await commit_turns(store, FakeBackend())
    log = await store.read_log(ORIGIN)
    await fork(store)
    await store.delete(ORIGIN)
    stored = await borrowed(store)
    assert (stored.snapshot, stored.decoded, stored.damage) == (None, None, None)
    assert stored.tail is not None
    assert stored.tail.ids == log


async def test_an_origin_that_went_on_lends_what_both_have_read(store: SessionStore) -> None:
    origin = await commit_turns(store, FakeBackend())
    head = await fork(store)
    await commit_log(store, origin, model_fingerprint=origin.model_fingerprint)
    assert_borrowed(await borrowed(store), head)
    await commit_log(store, head, new_ids=(9, 9), model_fingerprint=head.model_fingerprint)
    assert_borrowed(await borrowed(store), await store.get(FORK))


@pytest.mark.parametrize("change", ["rewound", "made again", "shed"])
async def test_an_origin_with_another_log_or_no_snapshot_lends_none(store: SessionStore, change: str) -> None:
    origin = await commit_turns(store, FakeBackend())
    await fork(store)
    if change == "rewound":
        rewind = Rewind(
            expected_version=origin.version,
            snapshot=None,
            position=0,
            model_fingerprint=origin.model_fingerprint,
            num_log_tokens=0,
            num_sampled=0,
            seed=None,
        )
        await store.rewind((await acquire(store)).lease, rewind)
    elif change == "made again":
        await store.delete(ORIGIN)
        new = await store.create(NewSession(key=ORIGIN, model_fingerprint=origin.model_fingerprint, metadata={}))
        for _ in range(3):
            new = await commit(store, new, new_ids=(3, 1, 4, 1, 5))
    else:
        cold = Shedding(unused_for_s=0.0, limit=1, of_model=(origin.model_fingerprint, origin.numerics))
        assert await store.shed_snapshots(cold) == 1
    assert (await borrowed(store)).decoded is None
