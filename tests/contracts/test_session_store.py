"""What every SessionStore keeps to, whatever it is made of."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest, LeaseLost, NotFound, SessionBusy, SnapshotCorrupt, VersionConflict
from nsm_core.state.quantize import FORMATS
from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.base import (
    Lease,
    LogMark,
    LogPoint,
    LogTail,
    NewSession,
    Rewind,
    SessionHead,
    SessionStore,
    TenantUsage,
)
from service.stores.sessions.key import SessionKey
from service.stores.sessions.transitions import SnapshotMark
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import acquire, commit, commit_under, create

KEY = SessionKey("a", "s1")


async def test_a_new_session_is_at_version_0_without_a_snapshot(store: SessionStore) -> None:
    head = await create(store)
    assert (head.version, head.position, head.num_log_tokens, head.snapshot_bytes) == (0, 0, 0, 0)
    assert (head.tenant, head.session_id, dict(head.metadata)) == ("a", "s1", {"k": "v"})
    assert head.created_at == head.updated_at > 0.0
    stored = await store.load(SessionKey("a", "s1"))
    assert (stored.head, stored.snapshot) == (head, None)
    assert (stored.damage, head.ttl_s, head.expires_at, head.forked_from) == (None, None, None, None)
    assert await store.read_log(SessionKey("a", "s1")) == ()
    assert await store.log_marks(KEY) == ()


async def test_an_id_is_taken_once_per_tenant(store: SessionStore) -> None:
    await create(store)
    with pytest.raises(VersionConflict, match="exists already"):
        await create(store)
    await create(store, tenant="b")


async def test_a_commit_moves_head_snapshot_and_log_together(store: SessionStore) -> None:
    head = await create(store)
    first = await commit(store, head, new_ids=(0, 5, 2**32 - 1))
    raw = make_snapshot(version=2).encode()
    second = await commit(store, first, snapshot=raw, new_ids=(9,), model_fingerprint="m2")
    assert (second.version, second.position, second.num_log_tokens, second.snapshot_bytes) == (2, 4, 4, len(raw))
    assert (second.created_at, second.model_fingerprint, dict(second.metadata)) == (head.created_at, "m2", {"k": "v"})
    assert second.updated_at > first.updated_at > head.updated_at
    stored = await store.load(SessionKey("a", "s1"))
    assert (stored.head, stored.snapshot) == (second, raw)
    assert await store.get(SessionKey("a", "s1")) == second
    assert await store.read_log(SessionKey("a", "s1")) == (0, 5, 2**32 - 1, 9)


async def test_a_stale_writer_changes_nothing(store: SessionStore) -> None:
    head = await create(store)
    committed = await commit(store, head)
    with pytest.raises(VersionConflict, match="is at version 1, expected_version was 0"):
        await commit(store, head, snapshot=make_snapshot(version=7).encode(), new_ids=(8, 8))
    stored = await store.load(SessionKey("a", "s1"))
    assert (stored.head, stored.snapshot) == (committed, make_snapshot(version=1).encode())
    assert await store.read_log(SessionKey("a", "s1")) == (1, 2, 3)


async def test_P5_of_many_that_want_to_write_at_once_one_gets_the_lease(store: SessionStore) -> None:
    head = await create(store)
    results = await asyncio.gather(*(acquire(store, holder=f"h{n}") for n in range(8)), return_exceptions=True)
    leases = [result.lease for result in results if not isinstance(result, BaseException)]
    assert len(leases) == 1
    assert sum(isinstance(result, SessionBusy) for result in results) == 7
    committed = await commit_under(store, leases[0], head)
    assert await store.get(KEY) == committed


async def test_a_turn_of_a_deleted_session_is_not_committed_to_its_successor(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store, holder="h")).lease
    await store.delete(KEY)
    with pytest.raises(NotFound):
        await commit_under(store, lease, head)
    successor = await create(store)
    same_names = (await acquire(store, holder="h")).lease
    assert same_names.fence == lease.fence
    for lost in (commit_under(store, lease, head), store.renew(lease, lease_s=1.0)):
        with pytest.raises(LeaseLost):
            await lost
    await store.release(lease)
    assert (await store.get(KEY)) == successor
    assert (await commit_under(store, same_names, successor)).version == 1


async def test_an_unknown_session_is_not_found_by_any_call(store: SessionStore) -> None:
    key = SessionKey("a", "nobody")
    for call in (store.get, store.load, store.read_log, store.log_marks, store.update, store.delete):
        with pytest.raises(NotFound, match="'nobody' does not exist") as caught:
            await call(key)
        assert (caught.value.param, caught.value.code) == ("session_id", "session_not_found")
    with pytest.raises(NotFound):
        await acquire(store, "nobody")


async def test_L6_another_tenants_session_does_not_exist(store: SessionStore) -> None:
    head = await commit(store, await create(store, tenant="a"))
    with pytest.raises(NotFound) as unknown:
        await store.get(SessionKey("b", "nobody"))
    for call in (store.get, store.load, store.read_log, store.log_marks, store.update, store.delete):
        with pytest.raises(NotFound) as caught:
            await call(SessionKey("b", "s1"))
        assert str(caught.value) == str(unknown.value).replace("nobody", "s1")
    with pytest.raises(NotFound):
        await acquire(store, tenant="b")
    assert await store.usage(tenant="b") == TenantUsage(num_sessions=0, num_bytes=0)
    assert (await store.list(tenant="b", limit=10)).heads == ()
    assert await store.get(SessionKey("a", "s1")) == head


async def test_L2_deleting_one_session_leaves_the_others_as_they_were(store: SessionStore) -> None:
    head = await commit(store, await create(store, "kept"))
    other_tenants = await commit(store, await create(store, "gone", tenant="b"))
    await commit(store, await create(store, "gone"))
    await store.delete(SessionKey("a", "gone"))
    with pytest.raises(NotFound):
        await store.load(SessionKey("a", "gone"))
    assert (await store.load(SessionKey("a", "kept"))).head == head
    assert (await store.load(SessionKey("b", "gone"))).head == other_tenants
    assert await store.read_log(SessionKey("b", "gone")) == (1, 2, 3)


async def test_a_session_made_again_starts_empty(store: SessionStore) -> None:
    await commit(store, await create(store))
    await store.delete(SessionKey("a", "s1"))
    await create(store)
    assert (await store.load(SessionKey("a", "s1"))).snapshot is None
    assert await store.read_log(SessionKey("a", "s1")) == ()


async def test_a_snapshot_that_fails_its_checksum_is_refused(store: SessionStore) -> None:
    raw = bytearray(make_snapshot().encode())
    raw[-40] ^= 1
    head = await commit(store, await create(store), snapshot=bytes(raw))
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        await store.load(SessionKey("a", "s1"))
    assert await store.get(SessionKey("a", "s1")) == head
    stored = (await acquire(store)).stored  # whoever may write may rebuild it
    assert (stored.head, stored.snapshot, stored.damage) == (head, None, "corrupt")


async def test_pages_are_newest_first_and_complete(store: SessionStore) -> None:
    for number in range(5):
        await create(store, f"s{number}")
    await create(store, "other", tenant="b")
    seen, cursor = [], None
    while True:
        page = await store.list(tenant="a", limit=2, cursor=cursor)
        seen.append([head.session_id for head in page.heads])
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [["s4", "s3"], ["s2", "s1"], ["s0"]]
    exact = await store.list(tenant="a", limit=5)
    assert (len(exact.heads), exact.next_cursor) == (5, None)


async def test_every_tenant_with_a_session_is_listed_once(store: SessionStore) -> None:
    assert await store.list_tenants() == ()
    for tenant, session_id in (("zoe", "s1"), ("a", "s1"), ("a", "s2"), ("é:{*}", "s1")):
        await create(store, session_id, tenant=tenant)
    assert await store.list_tenants() == ("a", "zoe", "é:{*}")
    await store.delete(SessionKey("zoe", "s1"))
    await store.delete(SessionKey("a", "s2"))
    assert await store.list_tenants() == ("a", "é:{*}")


async def test_a_cursor_stays_good_when_sessions_come_go_and_move_on(store: SessionStore) -> None:
    heads = [await create(store, f"s{number}") for number in range(4)]
    page = await store.list(tenant="a", limit=2)
    await store.delete(SessionKey("a", "s2"))  # the one the cursor points at
    await commit(store, heads[0])
    await create(store, "new")
    rest = await store.list(tenant="a", limit=2, cursor=page.next_cursor)
    assert [head.session_id for head in rest.heads] == ["s1", "s0"]


@pytest.mark.parametrize("cursor", ["", "%%%", "abc", "é", "AAAA", "bm90IGEgY3Vyc29y"])
async def test_a_cursor_that_no_page_gave_is_refused(store: SessionStore, cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="next_cursor") as caught:
        await store.list(tenant="a", limit=2, cursor=cursor)
    assert caught.value.param == "after"


async def test_the_store_is_writable_and_closes_twice(store: SessionStore) -> None:
    await store.check_writable()
    await store.close()
    await store.close()


async def test_what_is_loaded_is_what_was_encoded(store: SessionStore) -> None:
    snapshot = make_snapshot(num_floats=300_000)  # over a megabyte
    await commit(store, await create(store), snapshot=snapshot.encode())
    stored = await store.load(SessionKey("a", "s1"))
    assert stored.snapshot is not None
    assert Snapshot.decode(stored.snapshot) == snapshot


@pytest.mark.parametrize("dtype", FORMATS)
async def test_a_state_in_any_dtype_is_kept_as_it_is_and_counts_what_it_takes(store: SessionStore, dtype: str) -> None:
    zeros = make_snapshot(num_floats=64, stored_dtype=dtype, rounded_to=dtype)
    raw = dataclasses.replace(zeros, state=bytes(252) + b"\0\0\0A").encode()
    before = (await store.usage(tenant="a")).num_bytes
    head = await commit(store, await create(store), snapshot=raw)
    assert (await store.load(KEY)).snapshot == (await acquire(store)).stored.snapshot == raw
    assert head.snapshot_bytes == len(raw)
    assert (await store.usage(tenant="a")).num_bytes - before == len(raw) + 4 * head.num_log_tokens


async def test_the_log_tells_where_each_turn_ended_and_what_was_sampled(store: SessionStore) -> None:
    head = await commit(store, await create(store), new_ids=(1, 2, 3), num_sampled=2, seed=2**64 - 1)
    await commit(store, head, new_ids=(4,), num_sampled=1, seed=0)
    assert await store.log_marks(KEY) == (
        LogMark(version=1, num_log_tokens=3, num_sampled=2, seed=2**64 - 1),
        LogMark(version=2, num_log_tokens=4, num_sampled=1, seed=0),
    )
    for stop, expected in ((None, (1, 2, 3, 4)), (0, ()), (2, (1, 2)), (9, (1, 2, 3, 4))):
        assert await store.read_log(KEY, stop=stop) == expected


async def test_a_session_may_begin_with_a_state_and_a_log(store: SessionStore) -> None:
    raw = make_snapshot(session_id="s1", version=5).encode()
    marks = (
        LogMark(version=2, num_log_tokens=3, num_sampled=1, seed=4),
        LogMark(version=5, num_log_tokens=4, num_sampled=1, seed=None),
    )
    fields = {"model_fingerprint": "m1", "metadata": {"k": "v"}, "ttl_s": None, "forked_from": "other@4"}
    begin = {"version": 5, "position": 4, "snapshot": raw, "log_ids": (9, 8, 7, 6), "marks": marks}
    head = await store.create(NewSession(key=KEY, **fields, **begin))
    assert (head.version, head.position, head.num_log_tokens, head.snapshot_bytes) == (5, 4, 4, len(raw))
    assert (head.forked_from, dict(head.metadata)) == ("other@4", {"k": "v"})
    stored = await store.load(KEY)
    assert (stored.head, stored.snapshot) == (head, raw)
    assert await store.read_log(KEY) == (9, 8, 7, 6)
    assert await store.log_marks(KEY) == marks
    assert (await commit(store, head)).version == 6
    assert await store.read_log(KEY) == (9, 8, 7, 6, 1, 2, 3)
    with pytest.raises(VersionConflict, match="exists already"):
        await store.create(NewSession(key=KEY, **fields, **begin))


async def test_metadata_is_replaced_as_a_whole_and_moves_no_version(store: SessionStore) -> None:
    head = await commit(store, await create(store))
    lease = (await acquire(store)).lease  # a running turn does not prevent it, and does not undo it
    updated = await store.update(KEY, metadata={"new": "x"})
    assert (dict(updated.metadata), updated.version, updated.ttl_s) == ({"new": "x"}, 1, None)
    assert updated.updated_at > head.updated_at
    assert await store.get(KEY) == updated
    assert dict((await commit_under(store, lease, head)).metadata) == {"new": "x"}
    assert dict((await store.update(KEY)).metadata) == {"new": "x"}


async def test_usage_follows_every_change(store: SessionStore) -> None:
    async def expect(num_sessions: int, num_bytes: int) -> None:
        assert await store.usage(tenant="a") == TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)

    await expect(0, 0)
    head = await create(store)
    await create(store, "s2")
    await create(store, "s1", tenant="b")
    await expect(2, 0)
    size = len(make_snapshot(version=1).encode())
    head = await commit(store, head)
    await expect(2, size + 12)
    big = make_snapshot(version=2, num_floats=100).encode()
    head = await commit(store, head, snapshot=big, new_ids=(1,))
    await expect(2, len(big) + 16)
    lease = (await acquire(store)).lease
    small = make_snapshot(version=3, num_floats=2).encode()
    await rewind(store, lease, head, snapshot=small, num_log_tokens=2)
    await expect(2, len(small) + 8)
    await store.delete(SessionKey("a", "s2"))
    await expect(1, len(small) + 8)
    await store.delete(KEY)
    await expect(0, 0)


async def rewind(
    store: SessionStore, lease: Lease, head: SessionHead, *, snapshot: bytes | None, num_log_tokens: int
) -> SessionHead:
    return await store.rewind(
        lease,
        Rewind(
            expected_version=head.version,
            snapshot=snapshot,
            position=max(0, num_log_tokens - 1),
            model_fingerprint="m2",
            num_log_tokens=num_log_tokens,
            num_sampled=0,
            seed=5,
        ),
    )


@pytest.mark.parametrize(
    ("num_log_tokens", "ends"),
    [(6, [3, 5, 6, 6]), (5, [3, 5, 5]), (4, [3, 4]), (3, [3, 3]), (1, [1]), (0, [0])],
)
async def test_a_rewind_cuts_the_log_anywhere(store: SessionStore, num_log_tokens: int, ends: list[int]) -> None:
    head = await create(store)
    for new_ids in ((1, 2, 3), (4, 5), (6,)):
        head = await commit(store, head, new_ids=new_ids)
    lease = (await acquire(store)).lease
    raw = make_snapshot(version=4).encode() if num_log_tokens else None
    rewound = await rewind(store, lease, head, snapshot=raw, num_log_tokens=num_log_tokens)
    assert (rewound.version, rewound.num_log_tokens, rewound.position) == (
        4,
        num_log_tokens,
        max(0, num_log_tokens - 1),
    )
    assert (rewound.model_fingerprint, rewound.snapshot_bytes) == ("m2", len(raw or b""))
    stored = await store.load(KEY)
    assert (stored.head, stored.snapshot) == (rewound, raw)
    assert await store.read_log(KEY) == (1, 2, 3, 4, 5, 6)[:num_log_tokens]
    marks = await store.log_marks(KEY)
    assert [mark.num_log_tokens for mark in marks] == ends
    assert [mark.version for mark in marks] == [*range(1, len(ends)), 4]
    assert marks[-1] == LogMark(version=4, num_log_tokens=num_log_tokens, num_sampled=0, seed=5)
    again = await commit(store, rewound, new_ids=(9,))
    assert await store.read_log(KEY) == (*(1, 2, 3, 4, 5, 6)[:num_log_tokens], 9)
    assert (await acquire(store)).stored.head == again


async def test_a_commit_may_add_nothing_to_the_log(store: SessionStore) -> None:
    """The same place under another model: what a migration commits."""
    head = await commit(store, await create(store), new_ids=(1, 2, 3))
    other = make_snapshot(version=2, model_fingerprint="m2").encode()
    migrated = await commit(store, head, new_ids=(), num_sampled=0, snapshot=other, model_fingerprint="m2")
    assert (migrated.version, migrated.position, migrated.num_log_tokens) == (2, head.position, 3)
    assert migrated.model_fingerprint == "m2"
    key = SessionKey("a", "s1")
    assert (await store.load(key)).snapshot == other
    assert await store.read_log(key) == (1, 2, 3)
    marks = await store.log_marks(key)
    assert [(mark.version, mark.num_log_tokens, mark.num_sampled) for mark in marks] == [(1, 3, 1), (2, 3, 0)]
    later = await commit(store, migrated, new_ids=(4,), model_fingerprint="m2")
    assert await store.read_log(key) == (1, 2, 3, 4)
    lease = (await acquire(store)).lease
    fields: dict[str, Any] = {"model_fingerprint": "m2", "num_sampled": 0, "seed": 7, "position": 2}
    raw = make_snapshot(version=4).encode()
    await store.rewind(lease, Rewind(expected_version=later.version, snapshot=raw, num_log_tokens=2, **fields))
    assert await store.read_log(key) == (1, 2)
    assert [mark.version for mark in await store.log_marks(key)] == [4]


async def test_a_commit_may_add_two_versions_and_the_next_goes_on_from_the_first_of_them(store: SessionStore) -> None:
    first = await commit(store, await create(store), new_ids=(0, 1))
    border = SnapshotMark(first.version + 1, 4)
    raw = make_snapshot(version=border.version).encode()
    thought = await commit(
        store, first, new_ids=(2, 3, 4, 5), num_before_border=2, snapshot=raw, snapshot_mark=border, num_sampled=2
    )
    assert (thought.version, thought.position, thought.num_log_tokens) == (3, 6, 6)
    assert (thought.snapshot_version, thought.snapshot_position) == (2, 4)
    assert [(mark.version, mark.num_log_tokens, mark.num_sampled) for mark in await store.log_marks(KEY)] == [
        (1, 2, 1),
        (2, 4, 0),
        (3, 6, 2),
    ]
    stored = await store.load(KEY)
    assert stored.snapshot == raw
    assert stored.tail == LogTail((4, 5), (LogMark(version=3, num_log_tokens=6, num_sampled=2, seed=7),))
    after = LogPoint(2, 4)
    gone_on = await commit(
        store,
        dataclasses.replace(thought, position=after.num_log_tokens),
        new_ids=(6, 7, 8),
        num_before_border=1,
        after=after,
        is_log_alone=True,
    )
    assert (gone_on.version, gone_on.position, gone_on.num_log_tokens) == (5, 7, 7)
    assert await store.read_log(KEY) == (0, 1, 2, 3, 6, 7, 8)
    assert [(mark.version, mark.num_log_tokens) for mark in await store.log_marks(KEY)] == [
        (1, 2),
        (2, 4),
        (4, 5),
        (5, 7),
    ]
    assert (await store.load(KEY)).snapshot == raw
    assert await store.get(KEY) == gone_on


async def test_a_snapshot_behind_the_end_that_a_turn_went_on_from_is_gone(store: SessionStore) -> None:
    first = await commit(store, await create(store), new_ids=(0, 1))
    second = await commit(store, first, new_ids=(2, 3))
    cut = await commit(
        store, dataclasses.replace(second, position=2), new_ids=(9,), after=LogPoint(1, 2), is_log_alone=True
    )
    assert (cut.version, cut.num_log_tokens, cut.snapshot_version, cut.snapshot_bytes) == (3, 3, 0, 0)
    stored = await store.load(KEY)
    assert (stored.head, stored.snapshot, stored.damage) == (cut, None, None)
    assert stored.tail is not None
    assert stored.tail.ids == (0, 1, 9)
    third = await commit(store, cut, new_ids=(4,))
    assert await store.read_log(KEY) == (0, 1, 9, 4)
    assert (await store.load(KEY)).head == third


@pytest.mark.parametrize("after", [LogPoint(1, 1), LogPoint(1, 3), LogPoint(2, 2), LogPoint(7, 3)])
async def test_an_end_that_the_log_does_not_have_is_refused_and_nothing_changes(
    store: SessionStore, after: LogPoint
) -> None:
    first = await commit(store, await create(store), new_ids=(0, 1))
    second = await commit(store, first, new_ids=(2,))
    with pytest.raises(SnapshotCorrupt):
        await commit(store, second, new_ids=(9,), after=after, is_log_alone=True)
    assert await store.read_log(KEY) == (0, 1, 2)
    assert await store.get(KEY) == second
