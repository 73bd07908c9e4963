"""The Redis store in good order: what it keeps, what it refuses, what it repairs. Against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import ConfigError, InvalidRequest, NotFound, SnapshotCorrupt, StorageFull, VersionConflict
from nsm_core.state.snapshot import Snapshot
from service.records.factory import records_beside
from service.sessions.base import LogMark, SessionHead
from service.sessions.redis import RedisSessionStore
from service.sessions.redis_client import Attempt
from service.sessions.redis_keys import Keyspace, SessionKeys
from service.sessions.redis_scripts import REWIND
from service.sessions.redis_url import parse_redis_url
from tests.counts import scaled
from tests.lossy_proxy import LossyProxy
from tests.redis_servers import RedisClock, RedisServer, Topology, own_prefix, start_single
from tests.snapshots import make_snapshot
from tests.stored_sessions import acquire, commit, commit_under, create

pytestmark = pytest.mark.redis
KEY = {"tenant": "a", "session_id": "s1"}
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "redis.md"


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisSessionStore]:
    store = RedisSessionStore(parse_redis_url(url))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def prefix() -> str:
    return own_prefix()


@pytest.fixture
async def store(redis_single: Topology, prefix: str) -> AsyncIterator[RedisSessionStore]:
    async with opened(redis_single.url_with(prefix=prefix)) as store:
        yield store


@pytest.fixture
def keys(prefix: str) -> SessionKeys:
    return Keyspace(prefix).session("a", "s1")


def keys_left(server: RedisServer, prefix: str) -> list[bytes]:
    with server.client() as client:
        return sorted(client.scan_iter(f"{prefix}:*"))


@pytest.mark.parametrize("topology", ["redis_single", "redis_cluster", "redis_sentinel"])
async def test_D1_a_cancelled_call_never_gives_its_answer_to_another(
    topology: str, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(3)
    servers: Topology = request.getfixturevalue(topology)
    async with opened(servers.own_url(max_connections=4)) as store:
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
        assert store.num_connections_in_use() == 0
        for name in names:
            assert_whole(
                await store.get(tenant="a", session_id=name), await store.log_marks(tenant="a", session_id=name)
            )


async def one_call(store: RedisSessionStore, rng: random.Random, name: str) -> None:
    key = {"tenant": "a", "session_id": name}
    call = rng.choice((store.get, store.load, store.read_log, store.log_marks, store.update, None))
    if call is not None:
        await call(**key)
        return
    taken = await store.acquire(**key, holder=str(rng.random()), lease_s=0.001)
    await commit_under(store, taken.lease, taken.stored.head, num_floats=30_000)


async def check_own(store: RedisSessionStore, name: str) -> None:
    stored = await store.load(tenant="a", session_id=name)
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
    async with LossyProxy(port) as proxy, opened(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}") as store:
        yield store, proxy


async def test_D7_a_call_whose_answer_was_lost_is_done_once(lossy: tuple[RedisSessionStore, LossyProxy]) -> None:
    store, proxy = lossy

    async def losing(work: Callable[[], Awaitable[Any]], command: bytes = b"EVALSHA") -> Any:
        num_lost = proxy.num_lost
        proxy.lose_answer_to(command)
        result = await work()
        assert proxy.num_lost == num_lost + 1
        return result

    await create(store, "other")  # the server knows the scripts from here on
    await store.delete(tenant="a", session_id="other")
    head = await losing(lambda: create(store))
    assert (head.version, head.metadata) == (0, {"k": "v"})
    lease = (await losing(lambda: acquire(store))).lease
    assert lease.fence == 1
    renewed = await losing(lambda: store.renew(lease, lease_s=20.0))
    assert renewed.expires_at > lease.expires_at
    committed = await losing(lambda: commit_under(store, lease, head))
    assert committed == await store.get(**KEY)
    assert (committed.version, await store.read_log(**KEY)) == (1, (1, 2, 3))
    assert len(await store.log_marks(**KEY)) == 1
    assert (await losing(lambda: store.load(**KEY), b"HGETALL")).head == committed
    assert (await losing(lambda: store.update(**KEY, metadata={}))).metadata == {}
    await losing(lambda: store.delete(**KEY))
    with pytest.raises(NotFound):
        await store.get(**KEY)
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
    assert (rewound.version, await store.read_log(**KEY)) == (2, (1, 2))


async def rewind(store: RedisSessionStore, *, num_log_tokens: int) -> SessionHead:
    taken = await acquire(store)
    version = taken.stored.head.version
    return await store.rewind(
        taken.lease,
        expected_version=version,
        snapshot=make_snapshot(version=version + 1).encode(),
        position=1,
        model_fingerprint="m1",
        num_log_tokens=num_log_tokens,
        num_sampled=0,
        seed=None,
    )


async def test_a_restarted_server_is_taught_the_scripts_again(store: RedisSessionStore, redis_single: Topology) -> None:
    head = await create(store)
    with redis_single.servers[0].client() as client:
        client.script_flush()
    assert (await commit(store, head)).version == 1


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
    await store.delete(**KEY)
    assert [key for key in keys_left(redis_single.servers[0], prefix) if b":usage" not in key] == empty


async def test_R2_a_snapshot_that_is_not_the_heads_own_is_refused(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        client.set(keys.snapshot, make_snapshot(session_id="s2").encode())
    with pytest.raises(SnapshotCorrupt, match="not the one that was stored"):
        await store.load(**KEY)
    taken = await acquire(store)
    assert (taken.stored.snapshot, taken.stored.damage) == (None, "corrupt")


async def test_R3_a_snapshot_that_is_gone_is_an_error_never_an_empty_state(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        client.delete(keys.snapshot)
    with pytest.raises(SnapshotCorrupt, match="no snapshot of its version 1"):
        await store.load(**KEY)
    assert (await acquire(store)).stored.damage == "missing"


async def test_a_damaged_log_or_head_is_an_error(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys
) -> None:
    await commit(store, await create(store))
    with redis_single.servers[0].client() as client:
        whole = client.lindex(keys.log, 0)
        client.rpush(keys.log, whole)
        with pytest.raises(SnapshotCorrupt, match="6 tokens of 3"):
            await store.read_log(**KEY)
        client.ltrim(keys.log, 0, 0)
        client.lset(keys.log, 0, whole[:-1] + b"\1")
        with pytest.raises(SnapshotCorrupt, match="log of session 's1' fails its checksum"):
            await store.read_log(**KEY)
        await rewind(store, num_log_tokens=1)
        with pytest.raises(SnapshotCorrupt, match="fails its checksum"):  # a cut does not hide it
            await store.read_log(**KEY)
        client.hset(keys.head, "version", "x")
        with pytest.raises(SnapshotCorrupt, match="head"):
            await store.get(**KEY)


async def test_L6_a_head_under_another_sessions_key_is_never_used(
    store: RedisSessionStore, redis_single: Topology, keys: SessionKeys, prefix: str
) -> None:
    await create(store, tenant="b")
    with redis_single.servers[0].client() as client:
        client.copy(Keyspace(prefix).session("b", "s1").head, keys.head)
    for call in (store.get, store.load, store.read_log, store.log_marks):
        with pytest.raises(Exception, match="another session"):
            await call(**KEY)


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
    snapshot = make_snapshot(version=1).encode()
    async with opened(redis_single.own_url(max_value_bytes=len(snapshot) - 1)) as store:
        head = await create(store)
        leased = await acquire(store)
        with pytest.raises(StorageFull, match=rf"of {len(snapshot)} bytes .*max_value_bytes .* is {len(snapshot) - 1}"):
            await commit_under(store, leased.lease, head)
        assert await store.get(**KEY) == head
        with pytest.raises(StorageFull):
            await records_beside(store).put(
                tenant="a", kind="item", record_id="i", document={"text": "x" * len(snapshot)}, expected_version=0
            )
        await store.release(leased.lease)
    async with opened(redis_single.own_url(max_value_bytes=len(snapshot) + 1000)) as store:
        assert (await commit(store, await create(store))).version == 1


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


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random"])
async def test_D3_a_policy_that_may_drop_sessions_is_refused_at_start(redis_single: Topology, policy: str) -> None:
    with redis_single.servers[0].client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(ConfigError, match=f"maxmemory-policy {policy}, which may drop sessions"):
                async with opened(redis_single.own_url()):
                    pass
        finally:
            client.config_set("maxmemory-policy", "noeviction")


async def test_a_server_without_append_only_file_is_warned_of(
    redis_single: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nsm.store"):
        async with opened(redis_single.own_url()):
            pass
    assert "no append-only file" in caplog.text


async def test_sessions_of_a_newer_build_are_refused(redis_single: Topology, prefix: str) -> None:
    with redis_single.servers[0].client() as client:
        client.set(Keyspace(prefix).schema, 2)
    with pytest.raises(ConfigError, match="schema 2"):
        async with opened(redis_single.url_with(prefix=prefix)):
            pass


def documented_acl_rules() -> list[str]:
    """What docs/redis.md tells an operator to grant."""
    block = re.search(r"ACL SETUSER nsm on >PASSWORD (.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert block is not None
    return block[1].split()


@pytest.fixture(params=["redis_single", "redis_cluster"])
def acl_user(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of servers that know the user `nsm`, but for the scheme and the user."""
    topology: Topology = request.getfixturevalue(request.param)
    for server in topology.servers:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "nsm", "on", ">p@ss", *documented_acl_rules())
    yield topology.url
    for server in topology.servers:
        with server.client() as client:
            client.execute_command("ACL", "DELUSER", "nsm")
            for key in client.scan_iter("nsm:*"):
                client.delete(key)


async def test_an_acl_user_with_the_documented_commands_is_enough(acl_user: str) -> None:
    async with opened(acl_user.replace("://", "://nsm:p%40ss@")) as store:
        await every_call(store)


@pytest.mark.parametrize(("password", "options"), [("wrong", ""), ("p%40ss", "?prefix=others")])
async def test_a_user_who_may_not_is_refused_at_start(acl_user: str, password: str, options: str) -> None:
    with pytest.raises(ConfigError, match="refuses the user") as caught:
        async with opened(acl_user.replace("://", f"://nsm:{password}@") + options):
            pass
    assert "wrong" not in str(caught.value)


async def test_a_database_that_is_not_there_is_refused_at_start(redis_single: Topology) -> None:
    with pytest.raises(ConfigError, match="/99: the session store has no database of the number"):
        async with opened(f"{redis_single.url}/99"):
            pass


async def every_call(store: RedisSessionStore) -> None:
    head = await create(store, ttl_s=100.0)
    head = await commit(store, head)
    lease = await store.renew((await acquire(store)).lease, lease_s=1.0)
    empty = {"snapshot": None, "position": 0, "model_fingerprint": "m1", "num_log_tokens": 0}
    await store.rewind(lease, expected_version=1, **empty, num_sampled=0, seed=None)
    await store.release((await acquire(store)).lease)
    await store.update(**KEY, ttl_s=None)
    assert (await store.load(**KEY)).snapshot is None
    assert await store.read_log(**KEY) == ()
    assert len(await store.log_marks(**KEY)) == 1
    page = await store.list(tenant="a", limit=1)
    assert len(page.heads) == (await store.usage(tenant="a")).num_sessions == 1
    assert await store.list_tenants() == ("a",)
    await store.check_writable()
    await store.delete(**KEY)


def make_certificate(directory: Path) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([*command, *name, *files], check=True, capture_output=True)


async def test_over_tls_with_the_servers_certificate_checked(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    tls = f"tls-cert-file {tmp_path}/cert.pem\ntls-key-file {tmp_path}/key.pem\ntls-auth-clients no"
    topology = start_single(tmp_path / "server", tls)
    try:
        with topology.servers[0].client() as client:
            client.config_set("port", 0)
            client.config_set("tls-port", topology.servers[0].port)
        url = f"rediss://127.0.0.1:{topology.servers[0].port}"
        async with opened(f"{url}?tls_ca={tmp_path}/cert.pem") as store:
            await every_call(store)
        with pytest.raises(Exception, match="cannot be reached"):
            async with opened(url):
                pass
        with pytest.raises(ConfigError, match="there is no file"):
            async with opened(f"{url}?tls_ca=/nowhere.pem"):
                pass
    finally:
        topology.stop()


async def test_two_stores_on_one_server_exclude_each_other(redis_single: Topology, prefix: str) -> None:
    url = redis_single.url_with(prefix=prefix)
    async with opened(url) as one, opened(url) as two:
        head = await create(one)
        results = await asyncio.gather(
            *(commit(store, head, new_ids=(n,)) for n in range(4) for store in (one, two)), return_exceptions=True
        )
        winners = [result for result in results if isinstance(result, SessionHead)]
        assert len(winners) == 1
        assert len(await two.read_log(**KEY)) == 1


async def test_a_cursor_with_an_infinite_place_is_refused(store: RedisSessionStore) -> None:
    with pytest.raises(InvalidRequest, match="next_cursor"):
        await store.list(tenant="a", limit=1, cursor="aW5mIHg")
