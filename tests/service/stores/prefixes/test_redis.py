"""Prefixes in a Redis that they share with sessions: what they may take of it, and what a full one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.errors import NsmError, StorageFull, StoreUnavailable
from service.stores.prefixes.base import PrefixBounds, PrefixKey, PrefixUsage
from service.stores.prefixes.redis import RedisPrefixStore
from service.stores.redis.url import parse_redis_url
from tests.integration.test_redis_access import documented_acl_rules
from tests.support.redis_servers import Topology, own_prefix, start_single

pytestmark = pytest.mark.redis
BOUNDS = PrefixBounds(max_bytes=2**30, ttl_s=60.0)
KIB = 2**10


def key(number: int) -> PrefixKey:
    return PrefixKey(family="f0", position=number, digest=f"{number:032x}")


async def test_it_takes_a_quarter_of_the_servers_memory_and_a_full_one_refuses_it(tmp_path: Path) -> None:
    topology = start_single(tmp_path / "server", "maxmemory 16mb", "maxmemory-policy noeviction")
    store = RedisPrefixStore(parse_redis_url(topology.url), BOUNDS)
    try:
        await store.open()
        for number in range(12):
            await store.put(tenant="a", key=key(number), entry=bytes(1000 * KIB))
        assert await store.usage(tenant="a") == PrefixUsage(num_entries=4, num_bytes=4000 * KIB)
        with topology.servers[0].client() as client:
            assert len(list(client.scan_iter("nsm:prefix:*"))) == 4
            client.config_set("maxmemory", 1)
            with pytest.raises(StorageFull):
                await store.put(tenant="a", key=key(99), entry=b"entry")
            assert await store.load(tenant="a", key=key(11)) is not None
    finally:
        await store.close()
        topology.stop()


async def test_an_entry_that_vanished_by_itself_is_forgotten(redis_single: Topology) -> None:
    prefix = own_prefix()
    store = RedisPrefixStore(parse_redis_url(redis_single.url_with(prefix=prefix)), BOUNDS)
    await store.open()
    await store.put(tenant="a", key=key(1), entry=b"entry")
    with redis_single.servers[0].client() as client:
        client.delete(*client.scan_iter(f"{prefix}:prefix:*"))
    assert await store.load(tenant="a", key=key(1)) is None
    assert await store.find(tenant="a", family="f0") == ()
    assert await store.usage(tenant="a") == PrefixUsage(num_entries=0, num_bytes=0)
    await store.close()


async def test_the_documented_user_may_do_all_of_it(redis_single: Topology) -> None:
    with redis_single.servers[0].client() as client:
        client.execute_command("ACL", "SETUSER", "prefixes", "on", ">word", *documented_acl_rules())
        store = RedisPrefixStore(parse_redis_url(redis_single.url.replace("://", "://prefixes:word@")), BOUNDS)
        await store.open()
        for _ in range(2):
            await store.put(tenant="a", key=key(1), entry=b"entry")
        assert await store.find(tenant="a", family="f0") == (key(1),)
        assert await store.load(tenant="a", key=key(1)) == b"entry"
        assert await store.load(tenant="a", key=key(2)) is None
        assert (await store.usage(tenant="a")).num_entries == 1
        await store.remove(tenant="a", key=key(1))
        assert await store.remove_expired() == 0
        await store.close()
        client.execute_command("ACL", "DELUSER", "prefixes")
        client.delete(*client.scan_iter("nsm:{prefixes}:*"), "nsm:none")


async def test_a_server_that_is_gone_is_told_at_once(tmp_path: Path) -> None:
    topology = start_single(tmp_path / "server")
    store = RedisPrefixStore(parse_redis_url(topology.url), BOUNDS)
    await store.open()
    topology.stop()
    for call in (store.find(tenant="a", family="f0"), store.load(tenant="a", key=key(1))):
        with pytest.raises(StoreUnavailable):
            await call
    with pytest.raises(NsmError):
        await store.put(tenant="a", key=key(1), entry=b"entry")
    await store.close()
