"""The Redis store in good order: what it keeps, what it refuses, what it repairs. Against real servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest, NotFound, SnapshotCorrupt, StorageFull, VersionConflict
from nsm_core.state.snapshot import Snapshot
from service.stores.records.factory import records_beside
from service.stores.records.redis import RedisRecordStore
from service.stores.redis import client as redis_client
from service.stores.redis.client import Attempt
from service.stores.redis.keys import Keyspace, SessionKeys
from service.stores.redis.scripts import REWIND
from service.stores.sessions.base import LateSnapshot, LogMark, Rewind, SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.states.base import PUBLISHED, NamedState, NewState
from service.stores.states.redis import RedisStateStore
from tests.support.counts import scaled
from tests.support.gateway import until
from tests.support.lossy_proxy import LossyProxy
from tests.support.redis_servers import RedisClock, RedisServer, Topology, own_prefix
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import acquire, commit, commit_log, commit_under, create, opened_redis

pytestmark = pytest.mark.redis
KEY = SessionKey("a", "s1")


@pytest.fixture
def prefix() -> str:
    return own_prefix()


@pytest.fixture
async def store(redis_single: Topology, prefix: str) -> AsyncIterator[RedisSessionStore]:
    async with opened_redis(redis_single.url_with(prefix=prefix)) as store:
        yield store


@pytest.fixture
def keys(prefix: str) -> SessionKeys:
    return Keyspace(prefix).session(SessionKey("a", "s1"))


def keys_left(server: RedisServer, prefix: str) -> list[bytes]:
    with server.client() as client:
        return sorted(client.scan_iter(f"{prefix}:*"))


@pytest.mark.parametrize("topology", ["redis_single", "redis_cluster", "redis_sentinel"])
async def test_D1_a_cancelled_call_never_gives_its_answer_to_another(
    topology: str, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(3)
    servers: Topology = request.getfixturevalue(topology)
    async with opened_redis(servers.own_url(max_connections=4)) as store:
        names = [f"s{number}" for number in range(6)]
        for name in names:
            await commit(store, await create(store, name), num_floats=30_000)
        for _ in range(scaled(60, 3000)):
            cancelled = [asyncio.create_task(one_call(store, rng, rng.choice(names))) for _ in range(3)]
            await asyncio.sleep(rng.uniform(0.0, 0.004))
            for task in cancelled:
                task.cancel()
            checks = [asyncio.create_task(check_own(store, name)) for name in rng.sample(names, 3)]
            await asyncio.gather(*cancelled, return_exceptions=True)
            await asyncio.gather(*checks)
        await until(lambda: store.num_connections_in_use() == 0)  # a cancelled update leaves the index to a task
        for name in names:
            assert_whole(await store.get(SessionKey("a", name)), await store.log_marks(SessionKey("a", name)))


async def one_call(store: RedisSessionStore, rng: random.Random, name: str) -> None:
    key = SessionKey("a", name)
    call = rng.choice((store.get, store.load, store.read_log, store.log_marks, store.update, None))
    if call is not None:
        await call(key)
        return
    taken = await store.acquire(key, holder=str(rng.random()), lease_s=0.001)
    await commit_under(store, taken.lease, taken.stored.head, num_floats=30_000)


async def check_own(store: RedisSessionStore, name: str) -> None:
    stored = await store.load(SessionKey("a", name))
    assert stored.snapshot is not None
    header = Snapshot.decode(stored.snapshot).header
    assert (
        (header.session_id, header.version) == (name, stored.head.version) == (stored.head.session_id, header.version)
    )


def assert_whole(head: SessionHead, marks: tuple[LogMark, ...]) -> None:
    assert [mark.version for mark in marks] == list(range(1, head.version + 1))
    assert [mark.num_log_tokens for mark in marks] == [3 * version for version in range(1, head.version + 1)]
    assert head.num_log_tokens == 3 * head.version


@pytest.fixture
async def lossy(redis_single: Topology, prefix: str) -> AsyncIterator[tuple[RedisSessionStore, LossyProxy]]:
    port = redis_single.servers[0].port
    async with LossyProxy(port) as proxy, opened_redis(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}") as store:
        yield store, proxy


async def test_D7_a_call_whose_answer_was_lost_is_done_once(lossy: tuple[RedisSessionStore, LossyProxy]) -> None:
    store, proxy = lossy

    async def losing(work: Callable[[], Awaitable[Any]]) -> Any:
        num_lost = proxy.num_lost
        proxy.lose_answer_to(b"EVALSHA")
        result = await work()
        assert proxy.num_lost == num_lost + 1
        return result

    await create(store, "other")  # the server knows the scripts from here on
    await store.delete(SessionKey("a", "other"))
    head = await losing(lambda: create(store))
    assert (head.version, head.metadata) == (0, {"k": "v"})
    lease = (await losing(lambda: acquire(store))).lease
    assert lease.fence == 1
    renewed = await losing(lambda: store.renew(lease, lease_s=20.0))
    assert renewed.expires_at > lease.expires_at
    committed = await losing(lambda: commit_under(store, lease, head))
    assert committed == await store.get(KEY)
    assert (committed.version, await store.read_log(KEY)) == (1, (1, 2, 3))
    assert len(await store.log_marks(KEY)) == 1
    assert (await losing(lambda: store.load(KEY))).head == committed
    logged = await commit_log(store, committed)
    raw = make_snapshot(version=2).encode()
    late = LateSnapshot(created_at=logged.created_at, version=2, position=6, snapshot=raw)
    put = await losing(lambda: store.put_snapshot(KEY, late))
    assert (put, put.snapshot_version) == (await store.get(KEY), 2)
    assert (await losing(lambda: store.update(KEY, metadata={}))).metadata == {}
    await losing(lambda: store.delete(KEY))
    with pytest.raises(NotFound):
        await store.get(KEY)
    assert (await store.usage(tenant="a")).num_sessions == 0


async def test_D7_a_rewind_whose_answer_was_lost_cuts_once(
    lossy: tuple[RedisSessionStore, LossyProxy], redis_single: Topology
) -> None:
    store, proxy = lossy
    await commit(store, await create(store), new_ids=(1, 2, 3, 4))
    with redis_single.servers[0].client() as client:
        client.script_load(REWIND.text)
    proxy.lose_answer_to(REWIND.sha.encode())
    rewound = await rewind(store, num_log_tokens=2)
    assert proxy.num_lost == 1
    assert (rewound.version, await store.read_log(KEY)) == (2, (1, 2))


async def rewind(store: RedisSessionStore, *, num_log_tokens: int) -> SessionHead:
    taken = await acquire(store)
    version = taken.stored.head.version
    return await store.rewind(
        taken.lease,
        Rewind(
            expected_version=version,
            snapshot=make_snapshot(version=version + 1).encode(),
            position=1,
            model_fingerprint="m1",
            num_log_tokens=num_log_tokens,
            num_sampled=0,
            seed=None,
        ),
    )


async def test_a_restarted_server_is_taught_the_scripts_again(store: RedisSessionStore, redis_single: Topology) -> None:
    head = await create(store)
    with redis_single.servers[0].client() as client:
        client.script_flush()
    assert (await commit(store, head)).version == 1


async def test_D7_a_holder_whose_answer_was_lost_is_counted_once_whoever_counted_meanwhile(
    store: RedisSessionStore,
) -> None:
    records = RedisRecordStore(store)
    calls = [records._counting("a", "s1", 1) for _ in range(32)]
    counted = [await records._together(call) for call in (*calls, *calls)]
    assert counted == [[number] for number in range(1, 33)] + [[32]] * 32


async def test_a_refused_commit_leaves_no_snapshot_behind(
    store: RedisSessionStore, redis_single: Topology, prefix: str
) -> None:
    head = await create(store)
    await commit(store, head)
    before = keys_left(redis_single.servers[0], prefix)
    lease = (await acquire(store)).lease
    with pytest.raises(VersionConflict):
        await commit_under(store, lease, head)
    await store.release(lease)
    assert keys_left(redis_single.servers[0], prefix) == before


async def test_deletion_leaves_no_key_of_the_session(
    store: RedisSessionStore, redis_single: Topology, prefix: str
) -> None:
    empty = keys_left(redis_single.servers[0], prefix)
    head = await create(store, ttl_s=100.0)
    head = await commit(store, await commit(store, head))
    await store.delete(KEY)
    assert [key for key in keys_left(redis_single.servers[0], prefix) if b":usage" not in key] == empty


async def test_R2_a_snapshot_that_is_not_the_heads_own_is_refused(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        client.set(keys.snapshot, make_snapshot(session_id="s2").encode())
    with pytest.raises(SnapshotCorrupt, match="not the one that was stored"):
        await store.load(KEY)
    taken = await acquire(store)
    assert (taken.stored.snapshot, taken.stored.damage) == (None, "corrupt")


async def test_R3_a_snapshot_that_is_gone_is_an_error_never_an_empty_state(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        client.delete(keys.snapshot)
    with pytest.raises(SnapshotCorrupt, match="no snapshot of its version 1"):
        await store.load(KEY)
    assert (await acquire(store)).stored.damage == "missing"


async def test_a_damaged_log_or_head_is_an_error(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        whole = client.lindex(keys.log, 0)
        client.rpush(keys.log, whole)
        with pytest.raises(SnapshotCorrupt, match="6 tokens of 3"):
            await store.read_log(KEY)
        client.ltrim(keys.log, 0, 0)
        client.lset(keys.log, 0, whole[:-1] + b"\1")
        with pytest.raises(SnapshotCorrupt, match="log of session 's1' is damaged: a part of it fails its checksum"):
            await store.read_log(KEY)
        with pytest.raises(SnapshotCorrupt, match="last part fails its checksum"):  # no turn and no rewind hides it
            await acquire(store)
        client.hset(keys.head, "version", "x")
        with pytest.raises(SnapshotCorrupt, match="head"):
            await store.get(KEY)


async def test_L6_a_head_under_another_sessions_key_is_never_used(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys, prefix: str
) -> None:
    await create(store, tenant="b")
    with redis_single.servers[0].client() as client:
        client.copy(Keyspace(prefix).session(SessionKey("b", "s1")).head, keys.head)
    for call in (store.get, store.load, store.read_log, store.log_marks):
        with pytest.raises(Exception, match="another session"):
            await call(KEY)


async def test_a_listing_drops_what_has_no_head_and_spares_what_is_new(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys, prefix: str
) -> None:
    await commit(store, await create(store))
    await create(store, "s2")
    with redis_single.servers[0].client() as client:
        client.delete(keys.head)
    assert [head.session_id for head in (await store.list(tenant="a", limit=10)).heads] == ["s2"]
    assert (await store.usage(tenant="a")).num_sessions == 2
    RedisClock(redis_single, prefix).advance(61.0)
    assert [head.session_id for head in (await store.list(tenant="a", limit=1)).heads] == ["s2"]
    usage = await store.usage(tenant="a")
    assert (usage.num_sessions, usage.num_bytes) == (1, 0)


async def test_a_lost_index_is_made_again_by_the_next_commits(
    store: RedisSessionStore, redis_single: Topology, prefix: str
) -> None:
    head = await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        client.delete(*Keyspace(prefix).tenant("a"))
    head = await commit(store, head)
    assert (await store.list(tenant="a", limit=10)).heads == (head,)
    assert (await store.usage(tenant="a")).num_bytes == head.snapshot_bytes + 4 * head.num_log_tokens


async def test_D5_a_value_over_the_limit_is_refused_before_it_is_sent(redis_single: Topology) -> None:
    num_floats = 10_000  # more than a script
    snapshot = make_snapshot(version=1, num_floats=num_floats).encode()
    async with opened_redis(redis_single.own_url(max_value_bytes=len(snapshot) - 1)) as store:
        head = await create(store)
        leased = await acquire(store)
        with pytest.raises(StorageFull, match=rf"of {len(snapshot)} bytes .*max_value_bytes .* is {len(snapshot) - 1}"):
            await commit_under(store, leased.lease, head, num_floats=num_floats)
        assert await store.get(KEY) == head
        with pytest.raises(StorageFull):
            await records_beside(store).put(
                tenant="a", kind="item", record_id="i", document={"text": "x" * len(snapshot)}, expected_version=0
            )
        await store.release(leased.lease)
    async with opened_redis(redis_single.own_url(max_value_bytes=len(snapshot) + 1000)) as store:
        assert (await commit(store, await create(store), num_floats=num_floats)).version == 1


async def test_D5_a_large_snapshot_is_sent_in_pieces(
    store: RedisSessionStore, redis_single: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "PIECE_BYTES", 100)
    head = await commit(store, await create(store))
    assert (await store.load(KEY)).snapshot == make_snapshot(version=1).encode()
    with redis_single.servers[0].client() as client:
        num_pieces = client.info("commandstats")["cmdstat_setrange"]["calls"]
        assert num_pieces >= len(make_snapshot(version=1).encode()) // 100
        assert client.ttl(store.keys.session(KEY).snapshot) == -1
    await commit(store, head)
    assert (await store.load(KEY)).snapshot == make_snapshot(version=2).encode()


async def test_D5_lease_head_and_snapshot_come_in_one_round_trip(
    redis_single: Topology, store: RedisSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit(store, await create(store))
    trips: list[int] = []
    together = Attempt.together

    async def counted(attempt: Attempt, *commands: tuple[Any, ...]) -> list[Any]:
        trips.append(len(commands))
        return await together(attempt, *commands)

    async def alone(attempt: Attempt, *args: Any) -> Any:
        raise AssertionError(args[0])

    monkeypatch.setattr(Attempt, "together", counted)
    monkeypatch.setattr(Attempt, "command", alone)
    assert (await acquire(store)).stored.snapshot is not None
    assert trips == [2]


async def test_two_stores_on_one_server_exclude_each_other(redis_single: Topology, prefix: str) -> None:
    url = redis_single.url_with(prefix=prefix)
    async with opened_redis(url) as one, opened_redis(url) as two:
        head = await create(one)
        results = await asyncio.gather(
            *(commit(store, head, new_ids=(n,)) for n in range(4) for store in (one, two)), return_exceptions=True
        )
        winners = [result for result in results if isinstance(result, SessionHead)]
        assert len(winners) == 1
        assert len(await two.read_log(KEY)) == 1


async def test_a_cursor_with_an_infinite_place_is_refused(store: RedisSessionStore) -> None:
    with pytest.raises(InvalidRequest, match="next_cursor"):
        await store.list(tenant="a", limit=1, cursor="aW5mIHg")


async def test_two_first_states_of_a_name_that_is_published_meanwhile_are_both_refused(
    store: RedisSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither may take the other for the tenant's own earlier version."""
    states, add, paused, published = RedisStateStore(store), RedisStateStore._add, asyncio.Barrier(3), asyncio.Event()

    async def add_after_the_publication(self: RedisStateStore, tenant: str, name: str, state: NewState) -> NamedState:
        if tenant != PUBLISHED:
            await paused.wait()
            await published.wait()
        return await add(self, tenant, name, state)

    monkeypatch.setattr(RedisStateStore, "_add", add_after_the_publication)
    new = NewState(file=b"s", model_fingerprint="m", position=1, num_tokens=1, source="text")
    tries = [asyncio.create_task(states.add(tenant="a", name="rules", state=new)) for _ in range(2)]
    await paused.wait()
    await states.add(tenant=PUBLISHED, name="rules", state=new)
    published.set()
    ends = await asyncio.gather(*tries, return_exceptions=True)
    assert [type(end) for end in ends] == [VersionConflict, VersionConflict]
    assert await states.list(tenant="a") == ()
