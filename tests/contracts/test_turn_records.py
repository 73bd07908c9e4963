"""Turn records, as every SessionStore keeps them: begun once, appended to, ended with their session's commit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsm_core.errors import LeaseLost, NotFound, StateMismatch, VersionConflict
from service.stores.sessions.base import Lease, LeasedSession, Rewind, SessionHead, SessionStore
from service.stores.sessions.errors import OtherModel
from service.stores.sessions.key import SessionKey
from service.stores.sessions.turn_records import EndedTurn, TurnRecord, TurnStart
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import LEASE_S, Clock, acquire, commit, commit_under, create

KEY = SessionKey("a", "s1")
TTL_S = 600.0
MANY = 16


def start_of(turn_id: str = "t1", *, identity: str | None = None, **fields: Any) -> TurnStart:
    values = {"digest": "d", "base_version": None, "model_fingerprint": "m1", "request": b'{"input": "\xff"}', **fields}
    return TurnStart(turn_id=turn_id, identity=identity, **values)


def ended(turn_id: str = "t1", result: bytes = b"result\x00\xff") -> EndedTurn:
    return EndedTurn(turn_id=turn_id, result=result, ttl_s=TTL_S)


async def begin(store: SessionStore, lease: Lease, turn_id: str = "t1", **fields: Any) -> TurnRecord:
    record = await store.begin_turn(lease, start_of(turn_id, **fields), max_records=MANY)
    assert record is not None
    return record


async def get(store: SessionStore, turn_id: str = "t1", **fields: Any) -> TurnRecord:
    record = await store.get_turn(KEY, turn_id=turn_id, **fields)
    assert record is not None
    return record


async def test_a_running_turn_shows_its_request_and_what_was_appended(store: SessionStore) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    begun = await begin(store, lease, identity="key:é")
    assert (begun.turn_id, begun.status, begun.base_version, begun.digest) == ("t1", "running", 0, "d")
    again = await begin(store, lease, identity="key:é")  # the same call
    assert dataclasses.replace(again, lease_left_s=begun.lease_left_s) == begun
    for index, chunk in enumerate((b"one", b"\x00\xff", b"three")):
        assert not await store.append_turn(lease, "t1", index=index, chunk=chunk)
    assert not await store.append_turn(lease, "t1", index=2, chunk=b"three")  # the same call again
    record = await get(store)
    assert (record.request, record.chunks) == (b'{"input": "\xff"}', (b"one", b"\x00\xff", b"three"))
    assert (record.identity, record.result, record.is_cancel_wanted) == ("key:é", None, False)
    assert 0 < record.lease_left_s <= LEASE_S
    assert (await get(store, first_chunk=2)).chunks == (b"three",)
    assert (await get(store, first_chunk=3)).chunks == ()
    assert (await get(store, with_request=False)).request == b""
    by_identity = await store.get_turn(KEY, identity="key:é")
    assert by_identity is not None
    assert by_identity.turn_id == "t1"


async def test_a_chunk_that_would_leave_a_gap_is_refused(store: SessionStore) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease)
    with pytest.raises(NotFound):
        await store.append_turn(lease, "t1", index=1, chunk=b"x")
    with pytest.raises(NotFound):
        await store.append_turn(lease, "other", index=0, chunk=b"x")


async def test_D9_a_commit_carries_the_result_and_ends_the_record(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    await commit_under(store, lease, head, turn=ended())
    record = await get(store)
    assert (record.status, record.result, record.request, record.chunks) == ("committed", b"result\x00\xff", b"", ())
    assert (record.base_version, record.lease_left_s) == (0, 0.0)
    taken = (await acquire(store)).lease
    again = await begin(store, taken, "t2", identity="key:k", base_version=0)
    assert (again.turn_id, again.status, again.result) == ("t1", "committed", b"result\x00\xff")
    assert await store.get_turn(KEY, turn_id="t2") is None


async def test_a_refused_commit_leaves_the_record_running(store: SessionStore) -> None:
    head = await commit(store, await create(store))
    lease = (await acquire(store)).lease
    await begin(store, lease)
    with pytest.raises(VersionConflict):
        await commit_under(store, lease, await wrong(store), turn=ended())
    assert (await get(store)).status == "running"
    await commit_under(store, lease, head, turn=ended())
    assert (await get(store)).status == "committed"


async def wrong(store: SessionStore) -> SessionHead:
    return dataclasses.replace(await store.get(KEY), version=7)


async def test_a_turn_continues_the_version_it_names(store: SessionStore) -> None:
    await commit(store, await create(store))
    lease = (await acquire(store)).lease
    with pytest.raises(VersionConflict, match="is at version 1, expected_version was 0"):
        await begin(store, lease, base_version=0)
    assert (await begin(store, lease, base_version=1)).base_version == 1


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_turn_that_failed_is_told_of_and_runs_again(store: SessionStore, status: Any) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    await store.end_turn(lease, ended(), status=status)
    await store.end_turn(lease, ended(result=b"other"), status=status)
    record = await get(store)
    assert (record.status, record.result, record.chunks) == (status, b"result\x00\xff", ())
    assert await store.get_turn(KEY, identity="key:k") is None
    other = await begin(store, lease, "t2", identity="key:k", digest="another request")
    assert (other.turn_id, other.status, other.digest) == ("t1", status, "d")  # the identity stays what it was used for
    assert await store.get_turn(KEY, turn_id="t2") is None
    assert (await begin(store, lease, "t2", identity="key:k")).turn_id == "t2"
    assert (await get(store)).status == status


async def test_what_was_refused_before_it_began_leaves_nothing(store: SessionStore) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.forget_turn(lease, "t1")
    await store.forget_turn(lease, "t1")
    assert await store.get_turn(KEY, turn_id="t1") is None
    assert (await begin(store, lease, "t2", identity="key:k")).turn_id == "t2"


async def test_an_ended_turn_whose_place_a_later_one_takes_is_forgotten(store: SessionStore) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.end_turn(lease, ended(), status="failed")
    await begin(store, lease, "t2")
    await store.append_turn(lease, "t2", index=0, chunk=b"x")
    await store.forget_turn(lease, "t1")
    assert await store.get_turn(KEY, turn_id="t1") is None
    running = await store.get_turn(KEY, turn_id="t2")
    assert running is not None
    assert (running.status, running.chunks) == ("running", (b"x",))


async def test_D8_a_stale_holder_writes_no_turn(store: SessionStore, clock: Clock) -> None:
    await create(store)
    stale = (await acquire(store)).lease
    await begin(store, stale)
    await store.append_turn(stale, "t1", index=0, chunk=b"x")
    clock.advance(LEASE_S + 1)
    assert (await get(store)).lease_left_s == 0.0
    fresh = (await acquire(store)).lease
    for lost in (
        begin(store, stale, "t2"),
        store.append_turn(stale, "t1", index=1, chunk=b"stale"),
        store.end_turn(stale, ended(), status="failed"),
        store.forget_turn(stale, "t1"),
    ):
        with pytest.raises(LeaseLost):
            await lost
    assert not await store.append_turn(fresh, "t1", index=1, chunk=b"y")
    assert (await get(store)).chunks == (b"x", b"y")


async def test_the_holder_that_takes_over_finds_the_turn_by_its_identity(store: SessionStore, clock: Clock) -> None:
    head = await create(store)
    await begin(store, (await acquire(store)).lease, identity="key:k")
    clock.advance(LEASE_S + 1)
    lease = (await acquire(store)).lease
    found = await begin(store, lease, "t2", identity="key:k")
    assert (found.turn_id, found.status) == ("t1", "running")
    await commit_under(store, lease, head, turn=ended())
    assert (await get(store)).status == "committed"


async def test_an_abandoned_turn_ends_when_the_next_one_begins(store: SessionStore, clock: Clock) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease)
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    clock.advance(LEASE_S + 1)
    fresh = (await acquire(store)).lease
    await begin(store, fresh, "t2")
    record = await get(store)
    assert (record.status, record.result, record.chunks) == ("failed", None, ())
    assert not await store.append_turn(fresh, "t2", index=0, chunk=b"y")
    assert (await get(store, "t2")).chunks == (b"y",)


@pytest.mark.parametrize("how", ["commit", "rewind"])
async def test_whatever_moves_the_session_on_ends_an_abandoned_turn(
    store: SessionStore, clock: Clock, how: str
) -> None:
    head = await commit(store, await create(store))
    await begin(store, (await acquire(store)).lease)
    clock.advance(LEASE_S + 1)
    lease = (await acquire(store)).lease
    if how == "commit":
        await commit_under(store, lease, head)
    else:
        await store.rewind(
            lease,
            Rewind(
                expected_version=1,
                snapshot=None,
                position=0,
                model_fingerprint="m1",
                num_log_tokens=0,
                num_sampled=0,
                seed=None,
            ),
        )
    assert (await get(store)).status == "failed"


@pytest.mark.parametrize(("num_log_tokens", "num_whole"), [(9, 3), (6, 2), (5, 1), (3, 1), (2, 0), (0, 0)])
async def test_a_rewind_deletes_what_it_cuts_off_of_the_results_too(
    store: SessionStore, num_log_tokens: int, num_whole: int
) -> None:
    head = await create(store)
    for number in (1, 2, 3):
        lease = (await acquire(store)).lease
        await begin(store, lease, f"t{number}", identity=f"key:{number}")
        head = await commit_under(store, lease, head, turn=ended(f"t{number}"))
    await store.rewind(
        (await acquire(store)).lease,
        Rewind(
            expected_version=3,
            snapshot=make_snapshot(version=4).encode() if num_log_tokens else None,
            position=num_log_tokens,
            model_fingerprint="m1",
            num_log_tokens=num_log_tokens,
            num_sampled=0,
            seed=None,
        ),
    )
    records = [await get(store, f"t{number}") for number in (1, 2, 3)]
    assert [record.status for record in records] == ["committed"] * num_whole + ["cancelled"] * (3 - num_whole)
    assert [record.result is not None for record in records] == [True] * num_whole + [False] * (3 - num_whole)
    found = await store.get_turn(KEY, identity="key:3")
    assert (found is not None) == (num_whole == 3)


async def test_the_newest_records_are_kept(store: SessionStore) -> None:
    head = await create(store)
    for number in range(4):
        lease = (await acquire(store)).lease
        await store.begin_turn(lease, start_of(f"t{number}", identity=f"key:{number}"), max_records=3)
        head = await commit_under(store, lease, head, turn=ended(f"t{number}"))
    assert await store.get_turn(KEY, turn_id="t0") is None
    assert await store.get_turn(KEY, identity="key:0") is None
    assert [(await get(store, f"t{number}")).status for number in (1, 2, 3)] == ["committed"] * 3


async def test_a_record_is_kept_for_its_ttl(store: SessionStore, clock: Clock) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    head = await commit_under(store, lease, head, turn=ended())
    clock.advance(TTL_S - 1)
    assert (await get(store)).status == "committed"
    clock.advance(2)
    assert await store.get_turn(KEY, turn_id="t1") is None
    assert await store.get_turn(KEY, identity="key:k") is None
    assert await store.remove_expired() == 0
    lease = (await acquire(store)).lease
    assert (await begin(store, lease, "t2", identity="key:k")).turn_id == "t2"
    assert await store.get(KEY) == head


async def test_a_cancel_reaches_the_holder(store: SessionStore) -> None:
    await create(store)
    assert await store.cancel_turn(KEY) is None
    lease = (await acquire(store)).lease
    assert await store.cancel_turn(KEY) is None
    await begin(store, lease)
    found = await store.cancel_turn(KEY)
    assert found is not None
    assert (found.turn_id, found.status, found.is_cancel_wanted) == ("t1", "running", True)
    assert 0 < found.lease_left_s <= LEASE_S
    assert (await get(store)).is_cancel_wanted
    assert await store.append_turn(lease, "t1", index=0, chunk=b"x")
    with pytest.raises(NotFound):
        await store.cancel_turn(SessionKey("b", "s1"))


async def test_a_turn_without_a_holder_is_cancelled_at_once(store: SessionStore, clock: Clock) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    clock.advance(LEASE_S + 1)
    found = await store.cancel_turn(KEY)
    assert found is not None
    assert found.status == "cancelled"
    with pytest.raises(LeaseLost):  # it only slept, and must not commit what was told to be cancelled
        await commit_under(store, lease, await store.get(KEY), turn=ended())
    assert (await get(store)).status == "cancelled"
    assert (await begin(store, (await acquire(store)).lease, "t2", identity="key:k")).turn_id == "t2"


async def test_L6_another_tenants_turn_does_not_exist(store: SessionStore) -> None:
    await create(store)
    await create(store, tenant="b")
    await begin(store, (await acquire(store)).lease, identity="key:k")
    for which in ({"turn_id": "t1"}, {"identity": "key:k"}):
        assert await store.get_turn(SessionKey("b", "s1"), **which) is None
        assert await store.get_turn(SessionKey("a", "s2"), **which) is None


async def test_the_records_go_with_their_session(store: SessionStore, clock: Clock) -> None:
    head = await create(store, ttl_s=30.0)
    lease = (await acquire(store)).lease
    await begin(store, lease)
    await commit_under(store, lease, head, turn=ended())
    clock.advance(31.0)
    assert await store.get_turn(KEY, turn_id="t1") is None
    await create(store)
    assert await store.get_turn(KEY, turn_id="t1") is None
    await begin(store, (await acquire(store)).lease)
    await store.delete(KEY)
    assert await store.get_turn(KEY, turn_id="t1") is None
    await create(store)
    assert await store.get_turn(KEY, turn_id="t1") is None


async def test_records_count_as_stored_bytes(store: SessionStore) -> None:
    head = await create(store)
    for number in range(3):
        lease = (await acquire(store)).lease
        await store.begin_turn(lease, start_of(f"t{number}"), max_records=2)
        head = await commit_under(store, lease, head, turn=ended(f"t{number}", b"x" * 100))
    size = len(make_snapshot(version=3).encode()) + 4 * head.num_log_tokens
    assert (await store.usage(tenant="a")).num_bytes == size + 200
    await store.delete(KEY)
    assert (await store.usage(tenant="a")).num_bytes == 0


async def test_the_bytes_of_many_turns_are_those_of_the_records_that_are_left(store: SessionStore) -> None:
    head, max_records = await create(store), 3
    for number in range(3 * max_records):
        lease = (await acquire(store)).lease
        await store.begin_turn(lease, start_of(f"t{number}", request=b"r" * number), max_records=max_records)
        await store.append_turn(lease, f"t{number}", index=0, chunk=b"c" * 50)
        head = await commit_under(store, lease, head, is_log_alone=True, turn=ended(f"t{number}", b"x" * number))
        left = sum(range(max(0, number + 1 - max_records), number + 1))
        assert (await store.usage(tenant="a")).num_bytes == 4 * head.num_log_tokens + left


async def test_what_a_running_turn_holds_counts_and_comes_back_at_its_end(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    start, idle = dataclasses.replace(start_of("t1"), request=b"q" * 5000), await used(store)
    await store.begin_turn(lease, start, max_records=2)
    assert await used(store) == idle + 5000
    for index in range(2):
        await store.append_turn(lease, "t1", index=index, chunk=b"c" * 20_000)
        await store.append_turn(lease, "t1", index=index, chunk=b"c" * 20_000)  # said again: counted once
    assert await used(store) == idle + 5000 + 40_000
    await store.end_turn(lease, ended("t1", b"r" * 300), status="failed")
    assert await used(store) == idle + 300
    await store.begin_turn(lease, dataclasses.replace(start, turn_id="t2"), max_records=2)
    await store.forget_turn(lease, "t2")
    assert await used(store) == idle + 300
    await store.begin_turn(lease, dataclasses.replace(start, turn_id="t3"), max_records=1)
    head = await commit_under(store, lease, head, turn=ended("t3", b"r" * 200))
    assert await used(store) == head.snapshot_bytes + 4 * head.num_log_tokens + 200
    await store.delete(KEY)
    assert await used(store) == 0


async def test_an_abandoned_turn_counts_until_it_is_cancelled_or_its_session_deleted(
    store: SessionStore, clock: Clock
) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    idle = await used(store)
    start = dataclasses.replace(start_of("t1"), request=b"q" * 5000)
    await store.begin_turn(lease, start, max_records=2)
    await store.append_turn(lease, "t1", index=0, chunk=b"c" * 20_000)
    clock.advance(LEASE_S + 1)
    assert await used(store) == idle + 25_000
    await store.cancel_turn(KEY)
    assert await used(store) == idle
    lease = (await acquire(store)).lease
    await store.begin_turn(lease, dataclasses.replace(start, turn_id="t2"), max_records=2)
    await store.append_turn(lease, "t2", index=0, chunk=b"c" * 20_000)
    await store.delete(KEY)
    assert await used(store) == 0


async def used(store: SessionStore) -> int:
    return (await store.usage(tenant="a")).num_bytes


async def test_a_turn_begins_with_its_lease(store: SessionStore) -> None:
    await commit(store, await create(store))
    start = start_of("t1", identity="key:k", base_version=1)
    leased = await store.acquire(KEY, holder="h1", lease_s=LEASE_S, start=start, max_records=MANY)
    assert leased.record is not None
    assert (leased.record.turn_id, leased.record.status, leased.record.base_version) == ("t1", "running", 1)
    assert (await get(store)).request == start.request
    await commit_under(store, leased.lease, leased.stored.head, turn=ended())
    retry = start_of("t2", identity="key:k", base_version=1)
    found = await store.acquire(KEY, holder="h2", lease_s=LEASE_S, start=retry, max_records=MANY)
    assert found.record is not None
    assert (found.record.turn_id, found.record.status, found.record.result) == ("t1", "committed", b"result\x00\xff")
    assert await store.get_turn(KEY, turn_id="t2") is None
    await store.release(found.lease)
    assert (await acquire(store)).record is None


async def test_a_turn_at_another_version_gets_no_lease(store: SessionStore) -> None:
    await commit(store, await create(store))
    with pytest.raises(VersionConflict, match="is at version 1, expected_version was 0"):
        await store.acquire(KEY, holder="h1", lease_s=LEASE_S, start=start_of(base_version=0), max_records=MANY)
    assert await store.get_turn(KEY, turn_id="t1") is None
    await acquire(store)  # nobody has it


async def take(store: SessionStore, start: TurnStart, *, holder: str = "h1") -> LeasedSession:
    return await store.acquire(KEY, holder=holder, lease_s=LEASE_S, start=start, max_records=MANY)


async def test_R3_a_turn_of_another_model_gets_no_lease_and_leaves_an_unfinished_one(
    store: SessionStore, clock: Clock
) -> None:
    await commit(store, await create(store))
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    clock.advance(LEASE_S + 1)
    with pytest.raises(OtherModel) as caught:
        await take(store, start_of("t2", model_fingerprint="m2"))
    assert (caught.value.head.version, caught.value.head.model_fingerprint) == (1, "m1")
    assert isinstance(caught.value, StateMismatch)
    assert ((await get(store)).status, (await get(store)).chunks) == ("running", (b"x",))
    lease = (await acquire(store)).lease  # nobody has it
    with pytest.raises(OtherModel):
        await begin(store, lease, "t2", model_fingerprint="m2")
    assert (await get(store)).status == "running"


async def test_a_result_that_is_there_is_found_whatever_model_runs(store: SessionStore) -> None:
    head = await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await commit_under(store, lease, head, turn=ended())
    found = (await take(store, start_of("t2", identity="key:k", model_fingerprint="m2"))).record
    assert found is not None
    assert (found.turn_id, found.status) == ("t1", "committed")


async def test_a_session_without_a_text_may_be_any_models(store: SessionStore) -> None:
    await create(store)
    assert (await take(store, start_of(model_fingerprint="m2"))).record is not None


@pytest.mark.parametrize("identity", [None, "key:other"])
async def test_an_abandoned_turn_stays_until_another_one_takes_its_place(
    store: SessionStore, clock: Clock, identity: str | None
) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    clock.advance(LEASE_S + 1)
    other = start_of("t2", identity=identity)
    leased = await take(store, other)
    assert leased.record is None
    assert await store.begin_turn(leased.lease, other, max_records=MANY, ends_abandoned=False) is None
    await store.forget_turn(leased.lease, "t2")
    assert ((await get(store)).status, (await get(store)).chunks) == ("running", (b"x",))
    assert await store.get_turn(KEY, turn_id="t2") is None
    await begin(store, leased.lease, "t2", identity=identity)
    assert ((await get(store)).status, (await get(store)).chunks) == ("failed", ())
    assert (await get(store, "t2")).status == "running"
    await commit_under(store, leased.lease, leased.stored.head, turn=ended("t2"))
    assert (await get(store, "t2")).status == "committed"


async def test_a_retry_of_an_abandoned_turn_gets_its_record(store: SessionStore, clock: Clock) -> None:
    await create(store)
    lease = (await acquire(store)).lease
    await begin(store, lease, identity="key:k")
    await store.append_turn(lease, "t1", index=0, chunk=b"x")
    clock.advance(LEASE_S + 1)
    found = (await take(store, start_of("t2", identity="key:k"))).record
    assert found is not None
    assert (found.turn_id, found.status, found.chunks) == ("t1", "running", (b"x",))
