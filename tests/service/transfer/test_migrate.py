from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsm_core.errors import EngineDead
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import BpeTokenizer
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics
from service.transfer.backup import all_sessions
from service.transfer.migrate import Migrated, Migrator
from service.transfer.verify import verify
from service.turns.lease import Leases
from tests.support.committed_sessions import SEED, commit_turns, snapshot_of_log
from tests.support.fakes import FakeBackend
from tests.support.stored_rows import get_chunk, put_chunk, put_snapshot
from tests.support.stored_sessions import acquire, create


async def migrate(store: SessionStore, backend: FakeBackend, **options: Any) -> list[Migrated]:
    leases = Leases(store, lease_s=10.0, metrics=Metrics(backend))
    migrator = Migrator(store, backend, leases, **options)
    return [found async for found in migrator.run(await all_sessions(store))]


async def outcomes_of(store: SessionStore, backend: FakeBackend, **options: Any) -> dict[str, str]:
    return {found.name.session_id: found.outcome for found in await migrate(store, backend, **options)}


async def snapshot_of(store: SessionStore, session_id: str = "s1") -> Snapshot:
    stored = await store.load(SessionKey("a", session_id))
    assert stored.snapshot is not None
    return Snapshot.decode(stored.snapshot)


async def test_a_session_comes_to_the_running_model_with_all_it_had() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    head = await commit_turns(store, FakeBackend())
    before = await snapshot_of(store)
    assert [(found.outcome, found.num_log_tokens) for found in await migrate(store, new)] == [("migrated", 15)]
    migrated, after = await store.get(SessionKey("a", "s1")), await snapshot_of(store)
    assert (migrated.version, migrated.position, migrated.num_log_tokens) == (head.version + 1, head.position, 15)
    assert (migrated.model_fingerprint, dict(migrated.metadata)) == ("new", dict(head.metadata))
    assert (after.header.sampler, after.header.pending_id) == (before.header.sampler, before.header.pending_id)
    assert (after.header.model_fingerprint, after.header.parent, after.state) == ("new", head.version, before.state)
    assert [found.verdict async for found in verify(store, new, await all_sessions(store))] == ["same"]
    assert await acquire(store)  # the lease was given back


async def test_done_once_there_is_nothing_left_to_do() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    await commit_turns(store, FakeBackend(), "s1")
    await commit_turns(store, new, "s2")
    await create(store, "s3")
    assert await outcomes_of(store, new) == {"s1": "migrated", "s2": "current", "s3": "current"}
    heads = [await store.get(SessionKey("a", name)) for name in ("s1", "s2", "s3")]
    assert await outcomes_of(store, new) == {"s1": "current", "s2": "current", "s3": "current"}
    assert [await store.get(SessionKey("a", name)) for name in ("s1", "s2", "s3")] == heads
    assert len(new.requests) == 1


async def test_it_goes_on_where_it_was_stopped() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new", hold=True)
    for session_id in ("s1", "s2", "s3"):
        await commit_turns(store, FakeBackend(), session_id)
    new.release()
    running = asyncio.create_task(migrate(store, new))
    await new.held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    new.release_all()
    assert await outcomes_of(store, new) == {"s1": "current", "s2": "migrated", "s3": "migrated"}


async def test_a_dry_run_tells_and_writes_nothing() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    head = await commit_turns(store, FakeBackend())
    assert await outcomes_of(store, new, is_dry_run=True) == {"s1": "migrated"}
    assert await store.get(SessionKey("a", "s1")) == head
    assert new.requests == []


async def test_busy_gone_and_strange_sessions_are_left_alone() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    stranger = FakeBackend(tokenizer=BpeTokenizer.train(["Hello there"], vocab_size=280), fingerprint="stranger")
    await commit_turns(store, FakeBackend(), "s1")
    strange = await commit_turns(store, stranger, "s2")
    await acquire(store, "s1")
    assert await outcomes_of(store, new, is_repairing=True) == {"s1": "busy", "s2": "other_tokenizer"}
    assert await store.get(SessionKey("a", "s2")) == strange
    migrator = Migrator(store, new, Leases(store, lease_s=10.0, metrics=Metrics(new)))
    assert [found.outcome async for found in migrator.run([SessionKey("a", "s9")])] == ["gone"]


async def test_R3_a_damaged_state_is_made_again_when_asked_for() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    await commit_turns(store, backend)
    before = await snapshot_of(store)
    await put_snapshot(store, b"\0" * 100, tenant="a")
    assert await outcomes_of(store, backend) == {"s1": "current"}
    assert await outcomes_of(store, backend, is_repairing=True, is_dry_run=True) == {"s1": "repaired"}
    assert await outcomes_of(store, backend, is_repairing=True) == {"s1": "repaired"}
    after = await snapshot_of(store)
    assert (after.state, after.header.sampler) == (before.state, before.header.sampler)
    assert after.header.sampler.seed == SEED
    assert await outcomes_of(store, backend, is_repairing=True) == {"s1": "current"}


async def test_R2_another_sessions_state_is_replaced_and_nothing_of_it_used() -> None:
    store, backend = SqliteSessionStore(None), FakeBackend()
    head = await commit_turns(store, backend)
    before = await snapshot_of(store)
    await put_snapshot(store, snapshot_of_log(backend, head, (9, 9, 9), session_id="s2").encode(), tenant="a")
    assert await outcomes_of(store, backend, is_repairing=True) == {"s1": "repaired"}
    after = await snapshot_of(store)
    assert (after.state, after.header.sampler) == (before.state, before.header.sampler)


async def test_a_damaged_state_of_another_model_stays() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    await commit_turns(store, FakeBackend())
    await put_snapshot(store, b"\0" * 100, tenant="a")
    (found,) = await migrate(store, new, is_repairing=True)
    assert found.outcome == "other_damaged"
    assert "only that model can make it again" in str(found.error)


async def test_a_log_that_is_not_the_heads_is_not_read() -> None:
    store, new = SqliteSessionStore(None), FakeBackend(fingerprint="new")
    await commit_turns(store, FakeBackend(), "s1")
    await commit_turns(store, FakeBackend(), "s2")
    version, ids = await get_chunk(store, tenant="a")
    await put_chunk(store, version, ids[:-12], tenant="a")
    assert await outcomes_of(store, new) == {"s1": "failed", "s2": "migrated"}


async def test_an_engine_that_died_ends_it_and_frees_the_session() -> None:
    store = SqliteSessionStore(None)
    await commit_turns(store, FakeBackend())
    with pytest.raises(EngineDead):
        await migrate(store, FakeBackend(fingerprint="new", fail_after=0, error=EngineDead("gone")))
    assert await acquire(store)
