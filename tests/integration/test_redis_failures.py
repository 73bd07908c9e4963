"""Redis that dies, hangs, fills up or changes its master, in mid-turn. Every test has servers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from nsm_core.errors import LeaseLost, NotFound, NsmError, StorageFull, StoreUnavailable, VersionConflict
from nsm_core.state.snapshot import Snapshot
from service.stores.redis.keys import Keyspace
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from tests.support.counts import scaled
from tests.support.redis_servers import RedisServer, Topology, start_cluster, start_sentinel, start_single
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import acquire, commit, commit_under, create, opened_redis

pytestmark = pytest.mark.redis
KEY = SessionKey("a", "s1")
Result = TypeVar("Result")
ANSWERED_S = 15.0  # on any machine; who waits for a server that hangs waits longer
DURABLE = ("appendonly yes", "appendfsync always")


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Topology]:
    topology = start_single(tmp_path / "redis", *DURABLE)
    yield topology
    topology.stop()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[Topology]:
    topology = start_sentinel(tmp_path / "redis")
    yield topology
    topology.stop()


async def test_D7_kill_9_in_any_moment_of_a_commit_loses_nothing_and_repeats_nothing(durable: Topology) -> None:
    """The server is back before the commit's patience ends, so each of them is acknowledged in the end."""
    rng, server = random.Random(5), durable.servers[0]
    async with opened_redis(durable.url) as store:
        head = await create(store)
        for number in range(scaled(5, 20)):
            head = await commit(store, head, new_ids=(2 * number,), num_floats=100_000)
            taken = await acquire(store)
            turn = asyncio.create_task(
                commit_under(store, taken.lease, head, new_ids=(2 * number + 1,), num_floats=100_000)
            )
            await asyncio.sleep(rng.uniform(0.0, 0.012))
            server.kill()
            await asyncio.to_thread(server.start)
            head = await turn
            assert (head.version, head.num_log_tokens) == (2 * number + 2, 2 * number + 2)
            await assert_whole(store, head)


async def test_D7_a_commit_that_was_not_acknowledged_happened_once_or_not_at_all(durable: Topology) -> None:
    rng, server = random.Random(6), durable.servers[0]
    async with opened_redis(durable.url) as store:
        head = await create(store)
        for number in range(scaled(3, 20)):
            taken = await acquire(store)
            turn = asyncio.create_task(commit_under(store, taken.lease, head, new_ids=(number,), num_floats=100_000))
            await asyncio.sleep(rng.uniform(0.0, 0.012))
            server.kill()
            turn.cancel()  # the gateway dies as well
            await asyncio.gather(turn, return_exceptions=True)
            await asyncio.to_thread(server.start)
            found = await store.get(KEY)
            assert found.version in (head.version, head.version + 1)
            await assert_whole(store, found)
            head = found
            with contextlib.suppress(NsmError):
                await store.release(taken.lease)


async def assert_whole(store: RedisSessionStore, head: SessionHead) -> None:
    """Head, snapshot, log and marks are of one version; each turn left one token."""
    stored = await store.load(KEY)
    assert stored.head == head
    if head.version:
        assert stored.snapshot is not None
        assert Snapshot.decode(stored.snapshot).header.version == head.version
    log = await store.read_log(KEY)
    assert len(log) == len(set(log)) == head.version == head.num_log_tokens
    assert [mark.version for mark in await store.log_marks(KEY)] == list(range(1, head.version + 1))


async def test_D2_redis_gone_is_told_quickly_and_its_return_needs_no_restart(durable: Topology) -> None:
    async with opened_redis(durable.url) as store:
        head = await commit(store, await create(store))
        durable.servers[0].kill()
        for call in (store.get(KEY), acquire(store), store.usage(tenant="a"), store.check_writable()):
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
                await call
            assert time.monotonic() - start < ANSWERED_S
            assert caught.value.retry_after_s > 0
            assert "127.0.0.1" not in str(caught.value)  # clients read it
        with pytest.raises(StoreUnavailable, match=f"{durable.url}: .*cannot be reached"):
            async with opened_redis(durable.url):
                pass
        await asyncio.to_thread(durable.servers[0].start)
        assert (await store.load(KEY)).head == head
        assert (await commit(store, head)).version == 2


async def test_D2_more_calls_than_connections_wait_and_then_are_told(durable: Topology) -> None:
    async with opened_redis(f"{durable.url}?max_connections=2&pool_timeout_s=0.2&socket_timeout_s=20") as store:
        head = await create(store)
        durable.servers[0].pause()
        waiting = [asyncio.create_task(store.get(KEY)) for _ in range(2)]
        await asyncio.sleep(0)
        start = time.monotonic()
        results = await asyncio.gather(*(store.get(KEY) for _ in range(20)), return_exceptions=True)
        assert 0.15 < time.monotonic() - start < ANSWERED_S
        assert {type(result) for result in results} == {StoreUnavailable}
        assert all("all 2 connections" in str(result) for result in results)
        assert store.num_connections_in_use() == 2
        durable.servers[0].resume()
        assert await asyncio.gather(*waiting) == [head, head]
        assert await asyncio.gather(*(store.get(KEY) for _ in range(20))) == [head] * 20
        assert store.num_connections_in_use() == 0


async def test_a_server_that_hangs_is_given_up(durable: Topology) -> None:
    async with opened_redis(durable.url) as patient:
        head = await create(patient)
        async with opened_redis(f"{durable.url}?socket_timeout_s=0.2") as store:
            durable.servers[0].pause()
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await store.get(KEY)
            durable.servers[0].resume()
            assert await eventually(lambda: store.get(KEY)) == head


async def test_D3_a_full_server_takes_no_new_session_and_keeps_the_old_ones(tmp_path: Path) -> None:
    topology = start_single(tmp_path / "redis", "maxmemory 24mb", "maxmemory-policy noeviction")
    try:
        async with opened_redis(topology.url) as store:
            heads: list[SessionHead] = []
            with pytest.raises(StorageFull, match="is full"):
                await fill(store, heads)
            assert len(heads) >= 3
            with pytest.raises(StorageFull):  # not ready, though there may be room for something small
                await store.check_writable()
            limit = set_limit(topology, 1)  # what was freed since then may be enough for something small
            for call in (store.check_writable, lambda: acquire(store, "s0"), lambda: create(store, "one more")):
                with pytest.raises(StorageFull):
                    await call()
            set_limit(topology, limit)
            for head in heads:
                stored = await store.load(SessionKey("a", head.session_id))
                raw = make_snapshot(session_id=head.session_id, num_floats=250_000).encode()
                assert (stored.head, stored.snapshot) == (head, raw)
            await store.delete(SessionKey("a", "s1"))
            await store.delete(SessionKey("a", "s2"))
            await store.check_writable()
            assert (await commit(store, heads[0], num_floats=250_000)).version == 2
    finally:
        topology.stop()


async def test_X20_the_room_that_a_server_has_left_is_measured_before_it_is_full(tmp_path: Path) -> None:
    topology = start_single(tmp_path / "redis", "maxmemory 24mb", "maxmemory-policy noeviction")
    try:
        async with opened_redis(topology.url) as store:
            empty = await store.room()
            assert empty is not None
            assert (empty.kind, empty.num_bytes) == ("redis", 24 << 20)
            await commit(store, await create(store), num_floats=250_000)
            left = await store.room()
            assert left is not None
            assert 0 < left.num_free < empty.num_free - 1_000_000
            set_limit(topology, 1)
            full = await store.room()
            assert full is not None
            assert full.num_free == 0
            set_limit(topology, 0)
            assert await store.room() is None
    finally:
        topology.stop()


def set_limit(topology: Topology, num_bytes: int) -> int:
    """Returns the limit before."""
    with topology.servers[0].client() as client:
        before = int(client.config_get("maxmemory")["maxmemory"])
        client.config_set("maxmemory", num_bytes)
    return before


async def fill(store: RedisSessionStore, heads: list[SessionHead]) -> None:
    for number in range(100):
        heads.append(await commit(store, await create(store, f"s{number}"), num_floats=250_000))


async def test_a_running_turn_keeps_its_lease_on_a_full_server(tmp_path: Path) -> None:
    topology = start_single(tmp_path / "redis")
    try:
        async with opened_redis(topology.url) as store:
            head = await create(store)
            lease = (await acquire(store)).lease
            set_limit(topology, 1)
            renewed = await store.renew(lease, lease_s=20.0)
            with pytest.raises(StorageFull):
                await commit_under(store, renewed, head)
            assert await store.get(KEY) == head
            await store.release(renewed)
            await store.delete(KEY)
    finally:
        topology.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Topology]:
    topology = start_cluster(tmp_path / "redis", has_replicas=True)
    yield topology
    topology.stop()


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
async def test_D7_failover_in_mid_turn_commits_once_or_fails_cleanly(kind: str, request: pytest.FixtureRequest) -> None:
    topology: Topology = request.getfixturevalue(kind)
    async with opened_redis(topology.url) as store:
        head = await commit(store, await create(store), new_ids=(1,))
        lease = (await store.acquire(KEY, holder="h", lease_s=60.0)).lease
        master = await asyncio.to_thread(copied_master, topology)
        master.kill()
        with contextlib.suppress(StoreUnavailable):  # when the vote takes longer than a commit's patience
            assert (await commit_under(store, lease, head, new_ids=(2,))).version == 2
        found = await eventually(lambda: store.get(KEY))
        assert found.version in (1, 2)
        await assert_whole(store, found)
        with contextlib.suppress(LeaseLost, VersionConflict):  # the gateway tries again
            await commit_under(store, lease, head, new_ids=(2,))
        assert await store.read_log(KEY) == (1, 2)
        await asyncio.to_thread(master.start)  # comes back as a replica: nobody writes to it
        head = await commit(store, await store.get(KEY), new_ids=(3,))
        assert head.version == 3
        await assert_whole(store, head)


async def test_a_gateway_starts_while_a_replica_of_the_cluster_is_down(cluster: Topology) -> None:
    cluster.servers[-1].kill()
    async with opened_redis(cluster.url) as store:
        assert (await commit(store, await create(store))).version == 1


async def test_D7_a_cluster_that_lost_a_part_serves_again_when_it_is_back(tmp_path: Path) -> None:
    topology = start_cluster(tmp_path / "redis")
    try:
        async with opened_redis(topology.url) as store:
            for number in range(8):
                await create(store, f"s{number}")
            topology.servers[0].kill()
            calls = (store.get(SessionKey("a", f"s{number}")) for number in range(8))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results} <= {SessionHead, StoreUnavailable}
            assert any(isinstance(result, StoreUnavailable) for result in results)
            await asyncio.to_thread(topology.servers[0].start)
            for number in range(8):
                with contextlib.suppress(NotFound):  # the part's memory is lost: it had no append-only file
                    await eventually(functools.partial(store.get, SessionKey("a", f"s{number}")))
            assert len({(await create(store, f"new{number}")).session_id for number in range(8)}) == 8
    finally:
        topology.stop()


def copied_master(topology: Topology) -> RedisServer:
    """The server that holds the session, once its replica has everything."""
    key = Keyspace("nsm").session(SessionKey("a", "s1")).head
    for server in topology.servers:
        with server.client() as client, contextlib.suppress(redis.ResponseError):  # another part of the cluster
            if not server.is_sentinel and client.role()[0] == b"master" and client.exists(key):
                client.set(key + ":copied", 1)
                assert client.wait(1, 5000) == 1
                return server
    raise AssertionError("no server has the session")


async def eventually(call: Callable[[], Awaitable[Result]]) -> Result:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise


async def test_D8_a_stopped_holder_finds_its_lease_taken(durable: Topology) -> None:
    """By the server's clock, and a real one: leases in the contract's tests only seem to grow old."""
    async with opened_redis(durable.url) as store:
        head = await create(store)
        stale = (await store.acquire(KEY, holder="stale", lease_s=0.05)).lease
        await asyncio.sleep(0.06)
        fresh = (await acquire(store)).lease
        with pytest.raises(LeaseLost):
            await commit_under(store, stale, head)
        assert (await commit_under(store, fresh, head)).version == 1


async def test_a_session_vanishes_by_itself_when_its_time_has_come(durable: Topology) -> None:
    async with opened_redis(durable.url) as store:
        await commit(store, await create(store))
        await store.update(KEY, ttl_s=1.0)
        await asyncio.sleep(1.1)
        with pytest.raises(NotFound):
            await store.get(KEY)
        assert (await store.usage(tenant="a")).num_sessions == 0
