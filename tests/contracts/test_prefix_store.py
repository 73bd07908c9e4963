"""What every store of prefixes promises, on each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from service.stores.prefixes.base import PrefixBounds, PrefixKey, PrefixStore, PrefixUsage
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.redis import RedisPrefixStore
from service.stores.redis.url import parse_redis_url
from tests.support.redis_servers import Topology, own_prefix
from tests.support.stored_sessions import Clock

REDIS = ("redis_single", "redis_cluster")
BOUNDS = PrefixBounds(max_bytes=1000, ttl_s=100.0)
NONE = PrefixUsage(num_entries=0, num_bytes=0)
Advance = Callable[[float], None]


def redis_advance(topology: Topology, prefix: str) -> Advance:
    """What was used comes to have been used earlier."""

    def advance(seconds: float) -> None:
        for server in topology.servers:
            with server.client() as client:
                for key in client.scan_iter(f"{prefix}:{{prefixes}}:used"):
                    for name in client.zrange(key, 0, -1):
                        client.zincrby(key, -seconds * 1e6, name)
                for key in client.scan_iter(f"{prefix}:prefix:*"):
                    client.pexpireat(key, client.pexpiretime(key) - round(seconds * 1000))

    return advance


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.redis) for name in REDIS)])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[tuple[PrefixStore, Advance]]:
    clock = Clock()
    store: PrefixStore
    advance: Advance = clock.advance
    if request.param in REDIS:
        topology: Topology = request.getfixturevalue(request.param)
        prefix = own_prefix()
        store = RedisPrefixStore(parse_redis_url(topology.url_with(prefix=prefix)), BOUNDS)
        advance = redis_advance(topology, prefix)
    else:
        store = MemoryPrefixStore(BOUNDS, clock=clock)
    await store.open()
    yield store, advance
    await store.close()
    await store.close()


@pytest.fixture
def store(opened: tuple[PrefixStore, Advance]) -> PrefixStore:
    return opened[0]


@pytest.fixture
def advance(opened: tuple[PrefixStore, Advance]) -> Advance:
    return opened[1]


def key(number: int, *, family: str = "f0") -> PrefixKey:
    return PrefixKey(family=family, position=number, digest=f"{number:032x}")


async def held(store: PrefixStore, tenant: str = "a", *, family: str = "f0") -> set[int]:
    return {found.position for found in await store.find(tenant=tenant, family=family)}


async def put(store: PrefixStore, number: int, *, tenant: str = "a", size: int = 100) -> None:
    await store.put(tenant=tenant, key=key(number), entry=bytes([number % 256]) * size)


async def test_what_was_put_is_found_and_loaded_as_it_was(store: PrefixStore) -> None:
    assert await store.find(tenant="a", family="f0") == ()
    assert await store.load(tenant="a", key=key(1)) is None
    await put(store, 1)
    await store.put(tenant="a", key=key(2, family="f1"), entry=b"two")
    assert await store.find(tenant="a", family="f0") == (key(1),)
    assert await store.load(tenant="a", key=key(1)) == b"\1" * 100
    assert await store.load(tenant="a", key=key(2, family="f1")) == b"two"
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=2, num_bytes=103)


async def test_an_entry_put_again_replaces_the_one_before(store: PrefixStore) -> None:
    await put(store, 1, size=500)
    await put(store, 1, size=200)
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=1, num_bytes=200)
    assert await store.load(tenant="a", key=key(1)) == b"\1" * 200


async def test_L5_a_tenants_entries_do_not_exist_for_another(store: PrefixStore) -> None:
    await put(store, 1)
    assert await store.find(tenant="b", family="f0") == ()
    assert await store.load(tenant="b", key=key(1)) is None
    await store.remove(tenant="b", key=key(1))
    assert await store.usage(tenant="b") == NONE
    await store.put(tenant="b", key=key(1), entry=b"other")
    assert await store.load(tenant="a", key=key(1)) == b"\1" * 100
    assert await store.load(tenant="b", key=key(1)) == b"other"


async def test_what_is_removed_is_gone_and_may_be_removed_again(store: PrefixStore) -> None:
    await put(store, 1)
    await put(store, 2)
    for _ in range(2):
        await store.remove(tenant="a", key=key(1))
    assert await held(store) == {2}
    assert await store.load(tenant="a", key=key(1)) is None
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=1, num_bytes=100)


async def test_full_store_drops_the_least_recently_used_entry_of_a_lone_tenant(
    store: PrefixStore, advance: Advance
) -> None:
    for number in range(10):
        await put(store, number)
        advance(1)
    assert await store.load(tenant="a", key=key(0)) is not None
    advance(1)
    await put(store, 10)
    await put(store, 11)
    assert await held(store) == {0, *range(3, 12)}
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=10, num_bytes=1000)


async def test_L5_nobody_loses_anything_below_an_equal_share(store: PrefixStore, advance: Advance) -> None:
    await put(store, 0, tenant="small", size=300)
    advance(1)
    for number in range(6):
        await put(store, number, tenant="a")
        advance(1)
    for number in range(6):
        await put(store, number, tenant="b")
        advance(1)
    assert await held(store, "small") == {0}
    sizes = [(await store.usage(tenant=tenant)).num_bytes for tenant in ("small", "a", "b")]
    assert sum(sizes) <= BOUNDS.max_bytes
    assert sizes[0] == 300
    assert min(sizes[1:]) >= 300


async def test_an_entry_larger_than_a_bound_is_not_kept(store: PrefixStore) -> None:
    await put(store, 1)
    await put(store, 2, size=1001)
    assert await held(store) == {1}


async def test_what_was_not_used_for_the_ttl_is_gone(store: PrefixStore, advance: Advance) -> None:
    await put(store, 1)
    await put(store, 2)
    advance(60)
    assert await store.load(tenant="a", key=key(2)) is not None
    assert await store.remove_expired() == 0  # a write, which comes after that the use was noted
    advance(60)
    assert await held(store) == {2}
    assert await store.load(tenant="a", key=key(1)) is None
    await store.remove_expired()
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=1, num_bytes=100)
    advance(101)
    assert await store.remove_expired() == 1
    assert await store.usage(tenant="a") == NONE


async def test_many_tenants_keep_the_bounds(store: PrefixStore) -> None:
    for number in range(40):
        await put(store, number, tenant=f"t{number % 5}", size=90)
    sizes = [(await store.usage(tenant=f"t{number}")).num_bytes for number in range(5)]
    assert sum(sizes) <= BOUNDS.max_bytes
    assert min(sizes) >= 180
