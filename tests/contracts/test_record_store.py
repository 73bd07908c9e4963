"""What every RecordStore keeps to, whatever it is made of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.errors import VersionConflict
from service.stores.records.base import ABSENT, RecordStore
from service.stores.records.factory import records_beside
from service.stores.records.sqlite import SqliteRecordStore
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.redis_servers import RedisClock
from tests.support.stored_sessions import Clock

KEY: dict[str, Any] = {"tenant": "a", "kind": "response", "record_id": "r1"}
DOCUMENT = {"text": "é\u2028\"'", "items": [{"n": 1.5, "none": None}], "seed": 2**64 - 1}


@pytest.fixture
async def records(store: SessionStore, clock: Clock | RedisClock) -> AsyncIterator[RecordStore]:
    """On an open session store, with its clock where it is not the server's own."""
    if isinstance(clock, RedisClock):
        yield records_beside(store)
    else:
        assert isinstance(store, SqliteSessionStore)
        yield SqliteRecordStore(store, clock=clock)


async def test_a_document_comes_back_as_it_was_put(records: RecordStore) -> None:
    assert await records.get(**KEY) is None
    assert await records.put(**KEY, document=DOCUMENT, expected_version=ABSENT) == 1
    found = await records.get(**KEY)
    assert found is not None
    assert (found.record_id, found.version, found.document) == ("r1", 1, DOCUMENT)


async def test_a_writer_must_know_the_version(records: RecordStore) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT)
    assert await records.put(**KEY, document={"n": 2}, expected_version=1) == 2
    for stale in (ABSENT, 1, 3):
        with pytest.raises(VersionConflict, match="'r1' is not at version"):
            await records.put(**KEY, document={"n": 9}, expected_version=stale)
    found = await records.get(**KEY)
    assert found is not None
    assert (found.version, found.document) == (2, {"n": 2})


async def test_of_writers_at_once_one_wins(records: RecordStore) -> None:
    await records.put(**KEY, document={"n": 0}, expected_version=ABSENT)
    puts = [records.put(**KEY, document={"n": number}, expected_version=1) for number in range(1, 6)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert sorted(map(str, map(type, results))) == sorted([str(int), *[str(VersionConflict)] * 4])
    found = await records.get(**KEY)
    assert found is not None
    assert found.document["n"] == 1 + results.index(2)


async def test_what_differs_in_tenant_kind_or_id_is_another_document(records: RecordStore) -> None:
    others: list[dict[str, Any]] = [{**KEY, "tenant": "b"}, {**KEY, "kind": "item"}, {**KEY, "record_id": "r2"}]
    await records.put(**KEY, document={"n": 0}, expected_version=ABSENT)
    for number, other in enumerate(others):
        assert await records.get(**other) is None
        assert not await records.delete(**other)
        await records.put(**other, document={"n": number + 1}, expected_version=ABSENT)
    found = [await records.get(**key) for key in (KEY, *others)]
    assert [record.document["n"] for record in found if record is not None] == [0, 1, 2, 3]


async def test_what_is_deleted_is_gone_and_may_be_made_again(records: RecordStore) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT)
    assert await records.delete(**KEY)
    assert await records.get(**KEY) is None
    assert not await records.delete(**KEY)
    assert await records.put(**KEY, document={"n": 2}, expected_version=ABSENT) == 1


async def test_many_are_read_in_the_order_asked_for(records: RecordStore) -> None:
    for number in range(3):
        await records.put(
            tenant="a", kind="item", record_id=f"i{number}", document={"n": number}, expected_version=ABSENT
        )
    found = await records.get_many(tenant="a", kind="item", record_ids=("i2", "gone", "i0"))
    assert [None if record is None else record.document["n"] for record in found] == [2, None, 0]
    assert await records.get_many(tenant="a", kind="item", record_ids=()) == ()


async def test_a_document_lives_as_long_as_its_newest_ttl(records: RecordStore, clock: Clock | RedisClock) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT, ttl_s=100.0)
    clock.advance(60.0)
    await records.put(**KEY, document={"n": 2}, expected_version=1, ttl_s=100.0)
    clock.advance(60.0)
    assert await records.get(**KEY) is not None
    clock.advance(60.0)
    assert await records.get(**KEY) is None
    assert not await records.delete(**KEY)
    await records.put(**KEY, document={"n": 3}, expected_version=ABSENT)
    clock.advance(1e6)
    assert await records.get(**KEY) is not None


async def test_all_documents_are_found_with_their_owners(records: RecordStore, clock: Clock | RedisClock) -> None:
    assert [record async for record in records.scan()] == []
    keys = [("a", "item", f"i{number}") for number in range(120)] + [("b", "item", "i0"), ("b", "chain", "-{x}")]
    for number, (tenant, kind, name) in enumerate(keys):
        await records.put(
            tenant=tenant,
            kind=kind,
            record_id=name,
            document={"n": number},
            expected_version=ABSENT,  # type: ignore[arg-type]
        )
    await records.put(tenant="b", kind="item", record_id="gone", document={}, expected_version=ABSENT, ttl_s=10.0)
    clock.advance(11.0)
    found = {(one.tenant, one.kind, one.record_id): one.document async for one in records.scan()}
    assert found == {key: {"n": number} for number, key in enumerate(keys)}
    assert {(one.kind, one.record_id) async for one in records.scan(tenant="b")} == {("item", "i0"), ("chain", "-{x}")}


async def test_what_has_expired_is_swept_away(records: RecordStore, clock: Clock | RedisClock) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT, ttl_s=100.0)
    await records.put(tenant="a", kind="item", record_id="kept", document={}, expected_version=ABSENT)
    clock.advance(101.0)
    assert await records.remove_expired() in (1, 0)  # Redis has done it by itself
    assert await records.remove_expired() == 0
    assert await records.get(tenant="a", kind="item", record_id="kept") is not None


async def test_what_documents_take_is_counted_and_given_back(records: RecordStore, clock: Clock | RedisClock) -> None:
    assert await records.usage(tenant="a") == 0
    await records.put(**KEY, document=DOCUMENT, expected_version=ABSENT)
    await records.put(tenant="a", kind="item", record_id="i1", document={"t": "x" * 1000}, expected_version=ABSENT)
    await records.put(tenant="b", kind="item", record_id="i1", document={"t": "x"}, expected_version=ABSENT)
    sizes = len(json.dumps(DOCUMENT)), len(json.dumps({"t": "x" * 1000}))
    assert await records.usage(tenant="a") == sum(sizes)
    await records.put(**KEY, document={}, expected_version=1)
    with pytest.raises(VersionConflict):
        await records.put(**KEY, document=DOCUMENT, expected_version=1)
    assert await records.usage(tenant="a") == 2 + sizes[1]
    await records.put(**KEY, document={"n": 1}, expected_version=2, ttl_s=10.0)
    clock.advance(11.0)
    await records.remove_expired()
    assert await records.usage(tenant="a") == sizes[1]
    assert await records.delete(tenant="a", kind="item", record_id="i1")
    assert await records.usage(tenant="a") == 0
    assert await records.usage(tenant="b") == len(json.dumps({"t": "x"}))
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT)
    assert await records.usage(tenant="a") == len(json.dumps({"n": 1}))


async def test_a_document_that_is_put_holds_its_sessions(records: RecordStore) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT, holds=("s1", "s2"))
    await records.put(**{**KEY, "record_id": "r2"}, document={"n": 2}, expected_version=ABSENT, holds=["s1"])
    assert await records.let_go(tenant="a", session_ids=("s1", "s2")) == ("s2",)
    assert await records.let_go(tenant="b", session_ids=["s1"]) == ("s1",)  # another tenant's session of that name
    assert await records.let_go(tenant="a", session_ids=()) == ()
    assert await records.let_go(tenant="a", session_ids=("s1",)) == ("s1",)


async def test_a_put_that_is_refused_holds_nothing(records: RecordStore) -> None:
    await records.put(**KEY, document={"n": 1}, expected_version=ABSENT, holds=["s1"])
    with pytest.raises(VersionConflict):
        await records.put(**KEY, document={"n": 2}, expected_version=7, holds=["s1", "s2"])
    assert await records.let_go(tenant="a", session_ids=["s1"]) == ("s1",)
    assert [one async for one in records.scan() if one.kind == "chain"] == []


async def test_writers_at_once_hold_a_session_once_each(records: RecordStore) -> None:
    names = [f"r{number}" for number in range(8)]
    await asyncio.gather(
        *(
            records.put(**{**KEY, "record_id": name}, document={}, expected_version=ABSENT, holds=["s1"])
            for name in names
        )
    )
    (count,) = [one async for one in records.scan() if one.kind == "chain"]
    assert (count.record_id, dict(count.document)) == ("s1", {"num_holders": 8})
    left = [await records.let_go(tenant="a", session_ids=["s1"]) for _ in names]
    assert left == [()] * 7 + [("s1",)]
