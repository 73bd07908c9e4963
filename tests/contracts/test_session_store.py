"""What every SessionStore keeps to, whatever it is made of."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nsm_core.errors import InvalidRequest, NotFound, SnapshotCorrupt, VersionConflict
from nsm_core.state.snapshot import Snapshot
from service.sessions.base import SessionHead, SessionStore
from service.sessions.memory import MemorySessionStore
from service.sessions.sqlite import SqliteSessionStore
from tests.snapshots import make_snapshot


@pytest.fixture
def clock() -> Callable[[], float]:
    """Whole seconds, each once."""
    ticks = itertools.count(1_000)
    return lambda: float(next(ticks))


@pytest.fixture(params=["memory", "sqlite"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Callable[[], float]
) -> AsyncIterator[SessionStore]:
    made: SessionStore
    if request.param == "memory":
        made = MemorySessionStore(clock=clock)
    else:
        made = SqliteSessionStore(tmp_path / "data" / "sessions.db", clock=clock)
    await made.open()
    yield made
    await made.close()


async def create(store: SessionStore, session_id: str = "s1", *, tenant: str = "a") -> SessionHead:
    return await store.create(tenant=tenant, session_id=session_id, model_fingerprint="m1", metadata={"k": "v"})


async def commit(
    store: SessionStore,
    head: SessionHead,
    *,
    snapshot: bytes | None = None,
    new_ids: tuple[int, ...] = (1, 2, 3),
    model_fingerprint: str = "m1",
) -> SessionHead:
    version = head.version + 1
    return await store.commit(
        tenant=head.tenant,
        session_id=head.session_id,
        created_at=head.created_at,
        expected_version=head.version,
        snapshot=snapshot or make_snapshot(session_id=head.session_id, version=version).encode(),
        position=head.position + len(new_ids),
        model_fingerprint=model_fingerprint,
        new_ids=new_ids,
    )


async def test_a_new_session_is_at_version_0_without_a_snapshot(store: SessionStore) -> None:
    head = await create(store)
    assert (head.version, head.position, head.num_log_tokens, head.snapshot_bytes) == (0, 0, 0, 0)
    assert (head.tenant, head.session_id, dict(head.metadata)) == ("a", "s1", {"k": "v"})
    assert head.created_at == head.updated_at == 1_000.0
    stored = await store.load(tenant="a", session_id="s1")
    assert (stored.head, stored.snapshot) == (head, None)
    assert await store.read_log(tenant="a", session_id="s1") == ()


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
    assert (second.created_at, second.model_fingerprint, dict(second.metadata)) == (1_000.0, "m2", {"k": "v"})
    assert second.updated_at > first.updated_at > head.updated_at
    stored = await store.load(tenant="a", session_id="s1")
    assert (stored.head, stored.snapshot) == (second, raw)
    assert await store.get(tenant="a", session_id="s1") == second
    assert await store.read_log(tenant="a", session_id="s1") == (0, 5, 2**32 - 1, 9)


async def test_a_stale_writer_changes_nothing(store: SessionStore) -> None:
    head = await create(store)
    committed = await commit(store, head)
    with pytest.raises(VersionConflict, match="is at version 1, expected version 0"):
        await commit(store, head, snapshot=make_snapshot(version=7).encode(), new_ids=(8, 8))
    stored = await store.load(tenant="a", session_id="s1")
    assert (stored.head, stored.snapshot) == (committed, make_snapshot(version=1).encode())
    assert await store.read_log(tenant="a", session_id="s1") == (1, 2, 3)


async def test_of_many_writers_at_once_one_wins(store: SessionStore) -> None:
    head = await create(store)
    results = await asyncio.gather(*(commit(store, head, new_ids=(n,)) for n in range(8)), return_exceptions=True)
    winners = [result for result in results if isinstance(result, SessionHead)]
    assert len(winners) == 1
    assert sum(isinstance(result, VersionConflict) for result in results) == 7
    assert await store.get(tenant="a", session_id="s1") == winners[0]
    assert len(await store.read_log(tenant="a", session_id="s1")) == 1


async def test_a_turn_of_a_deleted_session_is_not_committed_to_its_successor(store: SessionStore) -> None:
    head = await create(store)
    await store.delete(tenant="a", session_id="s1")
    with pytest.raises(NotFound):
        await commit(store, head)
    successor = await create(store)
    with pytest.raises(VersionConflict, match="created again"):
        await commit(store, head)
    assert await store.get(tenant="a", session_id="s1") == successor


async def test_an_unknown_session_is_not_found_by_any_call(store: SessionStore) -> None:
    key = {"tenant": "a", "session_id": "nobody"}
    for call in (store.get, store.load, store.read_log, store.delete):
        with pytest.raises(NotFound, match="'nobody' does not exist") as caught:
            await call(**key)
        assert (caught.value.param, caught.value.code) == ("session_id", "session_not_found")


async def test_L6_another_tenants_session_does_not_exist(store: SessionStore) -> None:
    head = await commit(store, await create(store, tenant="a"))
    with pytest.raises(NotFound) as unknown:
        await store.get(tenant="b", session_id="nobody")
    for call in (store.get, store.load, store.read_log, store.delete):
        with pytest.raises(NotFound) as caught:
            await call(tenant="b", session_id="s1")
        assert str(caught.value) == str(unknown.value).replace("nobody", "s1")
    with pytest.raises(NotFound):
        await store.commit(
            tenant="b",
            session_id="s1",
            created_at=head.created_at,
            expected_version=1,
            snapshot=b"",
            position=9,
            model_fingerprint="m1",
            new_ids=(),
        )
    assert (await store.list(tenant="b", limit=10)).heads == ()
    assert await store.get(tenant="a", session_id="s1") == head


async def test_L2_deleting_one_session_leaves_the_others_as_they_were(store: SessionStore) -> None:
    kept = await commit(store, await create(store, "kept"))
    other_tenants = await commit(store, await create(store, "gone", tenant="b"))
    await commit(store, await create(store, "gone"))
    await store.delete(tenant="a", session_id="gone")
    with pytest.raises(NotFound):
        await store.load(tenant="a", session_id="gone")
    assert (await store.load(tenant="a", session_id="kept")).head == kept
    assert (await store.load(tenant="b", session_id="gone")).head == other_tenants
    assert await store.read_log(tenant="b", session_id="gone") == (1, 2, 3)


async def test_a_session_made_again_starts_empty(store: SessionStore) -> None:
    await commit(store, await create(store))
    await store.delete(tenant="a", session_id="s1")
    await create(store)
    assert (await store.load(tenant="a", session_id="s1")).snapshot is None
    assert await store.read_log(tenant="a", session_id="s1") == ()


async def test_a_snapshot_that_fails_its_checksum_is_refused(store: SessionStore) -> None:
    raw = bytearray(make_snapshot().encode())
    raw[-40] ^= 1
    head = await commit(store, await create(store), snapshot=bytes(raw))
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        await store.load(tenant="a", session_id="s1")
    assert await store.get(tenant="a", session_id="s1") == head


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


async def test_a_cursor_stays_good_when_sessions_come_go_and_move_on(store: SessionStore) -> None:
    heads = [await create(store, f"s{number}") for number in range(4)]
    page = await store.list(tenant="a", limit=2)
    await store.delete(tenant="a", session_id="s2")  # the one the cursor points at
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
    stored = await store.load(tenant="a", session_id="s1")
    assert stored.snapshot is not None
    assert Snapshot.decode(stored.snapshot) == snapshot
