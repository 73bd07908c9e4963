"""Leases, fences and TTL, as every SessionStore keeps them. Time is the clock's: nothing here waits."""

from __future__ import annotations

import time

import pytest

from nsm_core.errors import LeaseLost, NotFound, SessionBusy, VersionConflict
from service.stores.sessions.base import Rewind, SessionStore
from service.stores.sessions.key import SessionKey
from tests.support.stored_sessions import (
    LEASE_S,
    Clock,
    acquire,
    commit,
    commit_under,
    create,
    expires_in,
    without_expiry,
)

KEY = SessionKey("a", "s1")


async def test_a_lease_comes_with_the_session_as_it_stands_and_keeps_others_out(store: SessionStore) -> None:
    head = await commit(store, await create(store))
    taken = await acquire(store, holder="h1")
    assert (taken.stored.head, taken.stored.snapshot) == (head, (await store.load(KEY)).snapshot)
    lease = taken.lease
    assert (lease.tenant, lease.session_id, lease.created_at, lease.holder) == ("a", "s1", head.created_at, "h1")
    for holder in ("h1", "h2"):  # a holder is one turn: the same name is another turn's mistake
        with pytest.raises(SessionBusy, match="'s1' is busy") as caught:
            await acquire(store, holder=holder)
        assert caught.value.retry_after_s == 1.0
    assert await store.get(KEY) == head  # reading needs no lease
    await store.release(lease)
    assert (await acquire(store, holder="h2")).lease.fence == lease.fence + 1


async def test_a_busy_session_tells_how_long_the_lease_still_lasts(store: SessionStore, clock: Clock) -> None:
    await create(store)
    started = time.monotonic()  # some stores have a clock of their own, which goes on meanwhile
    await acquire(store)
    clock.advance(LEASE_S - 0.9)
    with pytest.raises(SessionBusy) as caught:
        await acquire(store)
    assert 0.85 - (time.monotonic() - started) < caught.value.retry_after_s <= 0.9


async def test_a_commit_ends_the_lease(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    head = await commit_under(store, lease, head)
    for lost in (commit_under(store, lease, head), store.renew(lease, lease_s=LEASE_S)):
        with pytest.raises(LeaseLost):
            await lost
    assert (await acquire(store)).lease.fence == lease.fence + 1


async def test_a_renewed_lease_lasts_from_then_on(store: SessionStore, clock: Clock) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    for _ in range(3):
        clock.advance(LEASE_S - 1)
        renewed = await store.renew(lease, lease_s=LEASE_S)
        assert renewed.expires_at > lease.expires_at
        assert (renewed.fence, renewed.holder) == (lease.fence, lease.holder)
        lease = renewed
    with pytest.raises(SessionBusy):
        await acquire(store)


async def test_D8_a_holder_that_slept_past_its_lease_cannot_overwrite_its_successor(
    store: SessionStore, clock: Clock
) -> None:
    head = await create(store)
    stale = (await acquire(store, holder="stale")).lease
    clock.advance(LEASE_S + 1)
    fresh = (await acquire(store, holder="fresh")).lease
    assert fresh.fence == stale.fence + 1
    for lost in (commit_under(store, stale, head, new_ids=(9,)), store.renew(stale, lease_s=LEASE_S)):
        with pytest.raises(LeaseLost):
            await lost
    await store.release(stale)  # takes nothing away from the new holder
    with pytest.raises(SessionBusy):
        await acquire(store)
    head = await commit_under(store, fresh, head)
    with pytest.raises(LeaseLost):
        await commit_under(store, stale, head, new_ids=(9,))
    assert await store.read_log(KEY) == (1, 2, 3)


async def test_D8_a_stale_holder_that_wakes_after_its_successor_released_is_refused(
    store: SessionStore, clock: Clock
) -> None:
    head = await create(store)
    stale = (await acquire(store)).lease
    clock.advance(LEASE_S + 1)
    await store.release((await acquire(store)).lease)
    with pytest.raises(LeaseLost):
        await commit_under(store, stale, head)
    with pytest.raises(LeaseLost):
        await store.renew(stale, lease_s=LEASE_S)


async def test_a_lease_that_expired_but_that_nobody_took_is_still_good(store: SessionStore, clock: Clock) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    clock.advance(LEASE_S + 1)
    lease = await store.renew(lease, lease_s=LEASE_S)
    with pytest.raises(SessionBusy):
        await acquire(store)
    clock.advance(LEASE_S + 1)
    assert (await commit_under(store, lease, head)).version == 1


async def test_a_wrong_version_is_told_apart_from_a_lost_lease_and_keeps_the_lease(store: SessionStore) -> None:
    head = await create(store)
    ahead = await commit(store, head)
    lease = (await acquire(store)).lease
    with pytest.raises(VersionConflict, match="is at version 1, expected_version was 0"):
        await commit_under(store, lease, head)
    with pytest.raises(SessionBusy):
        await acquire(store)
    assert (await commit_under(store, lease, ahead)).version == 2


async def test_a_rewind_needs_the_lease_and_ends_it(store: SessionStore, clock: Clock) -> None:
    head = await commit(store, await create(store))
    stale = (await acquire(store)).lease
    clock.advance(LEASE_S + 1)
    lease = (await acquire(store)).lease
    empty = {
        "snapshot": None,
        "position": 0,
        "model_fingerprint": "m1",
        "num_log_tokens": 0,
        "num_sampled": 0,
        "seed": None,
    }
    with pytest.raises(LeaseLost):
        await store.rewind(stale, Rewind(expected_version=1, **empty))
    with pytest.raises(VersionConflict):
        await store.rewind(lease, Rewind(expected_version=0, **empty))
    assert await store.get(KEY) == head
    assert (await store.rewind(lease, Rewind(expected_version=1, **empty))).version == 2
    await acquire(store)


async def test_releasing_twice_and_what_is_gone_is_no_error(store: SessionStore) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await store.release(lease)
    await store.release(lease)
    await store.delete(KEY)
    await store.release(lease)


async def test_a_lease_does_not_prevent_deletion(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    await store.delete(KEY)
    with pytest.raises(NotFound):
        await commit_under(store, lease, head)
    with pytest.raises(LeaseLost):
        await store.renew(lease, lease_s=LEASE_S)


async def test_a_session_whose_ttl_ran_out_does_not_exist(store: SessionStore, clock: Clock) -> None:
    head = await create(store, ttl_s=60.0)
    await create(store, "kept")
    assert head.ttl_s == 60.0
    assert expires_in(head) == pytest.approx(60.0)
    clock.advance(59.0)
    assert without_expiry(await store.get(KEY)) == without_expiry(head)
    clock.advance(1.0)
    for call in (store.get, store.load, store.read_log, store.log_marks, store.update, store.delete):
        with pytest.raises(NotFound):
            await call(KEY)
    with pytest.raises(NotFound):
        await acquire(store)
    assert [found.session_id for found in (await store.list(tenant="a", limit=10)).heads] == ["kept"]
    again = await create(store)
    assert (again.ttl_s, again.version) == (None, 0)


async def test_X16_a_store_tells_sessions_whose_ttl_ran_out_from_unknown_ones(
    store: SessionStore, clock: Clock
) -> None:
    await create(store, ttl_s=60.0)
    await create(store, "deleted", ttl_s=60.0)
    await store.delete(SessionKey("a", "deleted"))
    clock.advance(61.0)
    await store.remove_expired()
    reads = (store.get, store.load, store.read_log, store.log_marks, store.list_retained)
    calls = (*reads, store.update, store.delete)
    for name, code in (("s1", "session_expired"), ("deleted", "session_not_found"), ("unknown", "session_not_found")):
        key = SessionKey("a", name)
        for call in calls:
            with pytest.raises(NotFound) as refusal:
                await call(key)
            assert refusal.value.code == code, (call, name)
        with pytest.raises(NotFound) as refusal:
            await acquire(store, key.session_id)
        assert refusal.value.code == code


async def test_what_expired_is_removed_and_nothing_else(store: SessionStore, clock: Clock) -> None:
    await commit(store, await create(store, ttl_s=5.0))
    await create(store, "later", ttl_s=50.0)
    await create(store, "kept")
    assert await store.remove_expired() == 0
    clock.advance(10.0)
    assert await store.remove_expired() in (1, 0)  # 0 where the store did it by itself
    assert (await store.usage(tenant="a")).num_sessions == 2
    assert (await store.usage(tenant="a")).num_bytes == 0
    assert {found.session_id for found in (await store.list(tenant="a", limit=10)).heads} == {"later", "kept"}
    clock.advance(50.0)
    await store.remove_expired()
    assert (await store.usage(tenant="a")).num_sessions == 1


async def test_every_commit_and_update_moves_the_expiry_on(store: SessionStore, clock: Clock) -> None:
    head = await create(store, ttl_s=60.0)
    for _ in range(3):
        clock.advance(50.0)
        head = await commit(store, head)
        assert expires_in(head) == pytest.approx(60.0)
    clock.advance(50.0)
    head = await store.update(KEY)
    assert expires_in(head) == pytest.approx(60.0)
    head = await store.update(KEY, ttl_s=5.0)
    assert head.ttl_s == 5.0
    assert expires_in(head) == pytest.approx(5.0)
    head = await store.update(KEY, ttl_s=None)
    assert (head.ttl_s, head.expires_at) == (None, None)
    clock.advance(10_000.0)
    assert await store.get(KEY) == head


async def test_P3_a_ttl_does_not_end_a_session_with_a_running_turn(store: SessionStore, clock: Clock) -> None:
    head = await create(store, ttl_s=5.0)
    lease = (await acquire(store)).lease
    for _ in range(3):
        clock.advance(LEASE_S - 1)
        assert await store.remove_expired() == 0
        assert without_expiry(await store.get(KEY)) == without_expiry(head)
        lease = await store.renew(lease, lease_s=LEASE_S)
    with pytest.raises(SessionBusy):
        await acquire(store)
    committed = await commit_under(store, lease, head)
    assert expires_in(committed) == pytest.approx(5.0)
    clock.advance(6.0)
    with pytest.raises(NotFound):
        await store.get(KEY)


async def test_P3_an_expired_session_goes_with_its_last_lease(store: SessionStore, clock: Clock) -> None:
    head = await create(store, ttl_s=5.0)
    lease = (await acquire(store)).lease
    clock.advance(LEASE_S + 1)
    with pytest.raises(LeaseLost):
        await store.renew(lease, lease_s=LEASE_S)
    with pytest.raises(NotFound):
        await commit_under(store, lease, head)
    await create(store, "released", ttl_s=5.0)
    lease = (await acquire(store, "released")).lease
    clock.advance(6.0)
    assert (await store.get(SessionKey("a", "released"))).session_id == "released"
    await store.release(lease)
    with pytest.raises(NotFound):
        await store.get(SessionKey("a", "released"))
