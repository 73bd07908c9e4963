"""The older snapshots of a session, in every store."""

from __future__ import annotations

from typing import Any

import pytest

from nsm_core.errors import LeaseLost, NotFound
from service.stores.sessions.base import Rewind, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import MAX_RETAINED, Retention
from tests.support.redis_servers import RedisClock
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import Clock, acquire, commit, commit_under, create

KEY = SessionKey("a", "s1")


def raw_of(head: SessionHead) -> bytes:
    return make_snapshot(session_id=head.session_id, version=head.version).encode()


def joining(head: SessionHead, *stay: int) -> Retention:
    """The newest snapshot becomes one of those that `stay`."""
    return Retention(keep=(*stay, head.version))


async def turns(store: SessionStore, num_turns: int, *, session_id: str = "s1", **fields: Any) -> SessionHead:
    """A session of so many turns of 3 tokens that keeps all its older snapshots."""
    head = await commit(store, await create(store, session_id, **fields))
    for _ in range(num_turns - 1):
        head = await commit(store, head, retention=joining(head, *range(1, head.version)))
    return head


async def versions(store: SessionStore, session_id: str = "s1") -> list[tuple[int, int]]:
    retained = await store.list_retained(SessionKey("a", session_id))
    return [(one.version, one.position) for one in retained]


async def test_a_new_session_keeps_none_and_a_commit_none_by_itself(store: SessionStore) -> None:
    head = await commit(store, await create(store))
    assert await store.list_retained(KEY) == ()
    await commit(store, head)
    assert await store.list_retained(KEY) == ()
    assert (await acquire(store)).retained == ()


async def test_a_commit_keeps_what_it_is_told_to_and_drops_the_rest(store: SessionStore) -> None:
    head = await turns(store, 4)
    assert await versions(store) == [(1, 3), (2, 6), (3, 9)]
    leased = await acquire(store)
    assert leased.retained == await store.list_retained(KEY)
    assert all(one.num_bytes == len(make_snapshot(version=one.version).encode()) for one in leased.retained)
    await commit_under(store, leased.lease, head, retention=joining(head, 2))
    assert await versions(store) == [(2, 6), (4, 12)]
    assert await store.load_retained(KEY, version=2) == make_snapshot(version=2).encode()
    assert await store.load_retained(KEY, version=4) == make_snapshot(version=4).encode()
    assert await store.load_retained(KEY, version=1) is None
    assert (await store.load(KEY)).snapshot == make_snapshot(version=5).encode()


async def test_there_is_room_for_as_many_as_may_be_kept(store: SessionStore) -> None:
    head = await turns(store, MAX_RETAINED + 1)
    assert [version for version, _ in await versions(store)] == list(range(1, MAX_RETAINED + 1))
    stay = tuple(range(2, MAX_RETAINED + 1))
    await commit(store, head, retention=joining(head, *stay))
    assert [version for version, _ in await versions(store)] == [*stay, MAX_RETAINED + 1]
    for version in (*stay, MAX_RETAINED + 1):
        assert await store.load_retained(KEY, version=version) == make_snapshot(version=version).encode()


async def test_a_refused_commit_changes_nothing(store: SessionStore) -> None:
    head = await turns(store, 3)
    lease = (await acquire(store)).lease
    await store.release(lease)
    with pytest.raises(LeaseLost):
        await commit_under(store, lease, head, retention=joining(head))
    assert await versions(store) == [(1, 3), (2, 6)]


@pytest.mark.parametrize(
    ("cut", "left"), [(12, [(1, 3), (2, 6), (3, 9)]), (6, [(1, 3), (2, 6)]), (5, [(1, 3)]), (0, [])]
)
async def test_a_rewind_drops_those_beyond_its_cut(store: SessionStore, cut: int, left: list[tuple[int, int]]) -> None:
    await turns(store, 4)
    lease = (await acquire(store)).lease
    fields: dict[str, Any] = {"model_fingerprint": "m1", "num_sampled": 0, "seed": 7, "position": cut}
    raw = make_snapshot(version=5).encode() if cut else None
    await store.rewind(lease, Rewind(expected_version=4, snapshot=raw, num_log_tokens=cut, **fields))
    assert await versions(store) == left
    for version, _ in left:
        assert await store.load_retained(KEY, version=version) == make_snapshot(version=version).encode()


async def test_a_rewind_under_another_model_drops_them_all(store: SessionStore) -> None:
    await turns(store, 3)
    lease = (await acquire(store)).lease
    fields: dict[str, Any] = {"model_fingerprint": "m2", "num_sampled": 0, "seed": 7, "position": 7}
    raw = make_snapshot(version=4).encode()
    await store.rewind(lease, Rewind(expected_version=3, snapshot=raw, num_log_tokens=7, **fields))
    assert await versions(store) == []


async def test_their_bytes_are_the_tenants(store: SessionStore) -> None:
    head = await turns(store, 3)
    newest, retained = len(raw_of(head)), await store.list_retained(KEY)
    usage = await store.usage(tenant="a")
    assert usage.num_bytes == newest + sum(one.num_bytes for one in retained) + 4 * head.num_log_tokens
    await store.delete(KEY)
    assert (await store.usage(tenant="a")).num_bytes == 0


async def test_they_go_with_the_session(store: SessionStore) -> None:
    await turns(store, 3)
    await store.delete(KEY)
    for call in (store.list_retained(KEY), store.load_retained(KEY, version=1)):
        with pytest.raises(NotFound):
            await call
    await commit(store, await create(store))
    assert await versions(store) == []
    assert await store.load_retained(KEY, version=2) is None


async def test_they_live_as_long_as_the_session(store: SessionStore, clock: Clock | RedisClock) -> None:
    head = await turns(store, 2, ttl_s=100.0)
    clock.advance(60.0)
    await commit(store, head, retention=joining(head, 1))
    clock.advance(60.0)
    assert [version for version, _ in await versions(store)] == [1, 2]
    assert await store.load_retained(KEY, version=1) is not None
    await store.update(KEY, ttl_s=None)
    clock.advance(200.0)
    assert await store.load_retained(KEY, version=2) is not None
    await store.update(KEY, ttl_s=50.0)
    clock.advance(60.0)
    with pytest.raises(NotFound):
        await store.list_retained(KEY)
    assert (await store.usage(tenant="a")).num_bytes == 0 or await store.remove_expired() == 1


async def test_L6_nobody_elses(store: SessionStore) -> None:
    await turns(store, 3)
    await commit(store, await create(store, tenant="b"))
    assert await store.list_retained(SessionKey("b", "s1")) == ()
    assert await store.load_retained(SessionKey("b", "s1"), version=2) is None
    await turns(store, 2, session_id="s2")
    assert await versions(store) == [(1, 3), (2, 6)]


async def test_R3_a_damaged_one_is_not_there(store: SessionStore) -> None:
    raw = make_snapshot(version=1).encode()
    broken = raw[:-1] + bytes((raw[-1] ^ 1,))
    head = await commit(store, await create(store), snapshot=broken)
    await commit(store, head, retention=joining(head))
    assert await versions(store) == [(1, 3)]
    assert await store.load_retained(KEY, version=1) is None
