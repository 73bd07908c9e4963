"""What the Redis store asks of a server and of its user before it opens. Against real servers."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import service
from nsm_core.errors import ConfigError
from service.stores.redis.keys import Keyspace
from service.stores.sessions.base import LogTail, Rewind
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.turn_records import EndedTurn, TurnStart
from service.stores.states.base import NewState
from service.stores.states.redis import RedisStateStore
from tests.support.redis_servers import Topology, own_prefix, start_single
from tests.support.stored_sessions import acquire, commit, commit_log, create, opened_redis

pytestmark = pytest.mark.redis
KEY = SessionKey("a", "s1")
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "redis.md"


@pytest.fixture
def prefix() -> str:
    return own_prefix()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random"])
async def test_D3_a_policy_that_may_drop_sessions_is_refused_at_start(redis_single: Topology, policy: str) -> None:
    with redis_single.servers[0].client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(ConfigError, match=f"maxmemory-policy {policy}, which may drop sessions"):
                async with opened_redis(redis_single.own_url()):
                    pass
        finally:
            client.config_set("maxmemory-policy", "noeviction")


async def test_a_server_without_append_only_file_is_warned_of(
    redis_single: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "nsm.store"):
        async with opened_redis(redis_single.own_url()):
            pass
    assert "no append-only file" in caplog.text


async def test_sessions_of_a_newer_build_are_refused(redis_single: Topology, prefix: str) -> None:
    with redis_single.servers[0].client() as client:
        client.set(Keyspace(prefix).layout_version, 4)
    with pytest.raises(ConfigError, match="layout version 4, this build knows version 3"):
        async with opened_redis(redis_single.url_with(prefix=prefix)):
            pass


async def test_sessions_of_key_layout_1_are_read_and_go_on(redis_single: Topology, prefix: str) -> None:
    new_fields = ("snapshot_version", "snapshot_position", "tokenizer_fingerprint", "numerics", "energy_joules")
    url, key = redis_single.url_with(prefix=prefix), SessionKey("a", "s1")
    async with opened_redis(url) as store:
        head = await commit(store, await create(store))
        await create(store, "empty")
    with redis_single.servers[0].client() as client:
        client.set(Keyspace(prefix).layout_version, 1)
        for session_id in ("s1", "empty"):
            client.hdel(Keyspace(prefix).session(SessionKey("a", session_id)).head, *new_fields)
    async with opened_redis(url) as store:
        stored = await store.load(key)
        assert stored.head == dataclasses.replace(head, tokenizer_fingerprint="", numerics="")
        assert (stored.tail, (await store.get(SessionKey("a", "empty"))).snapshot_version) == (LogTail(), 0)
        newest = await commit_log(store, stored.head)
        assert (newest.snapshot_version, newest.snapshot_position) == (1, 3)
    with redis_single.servers[0].client() as client:
        assert client.get(Keyspace(prefix).layout_version) == b"3"


def documented_acl_rules() -> list[str]:
    """What docs/redis.md tells an operator to grant."""
    block = re.search(r"ACL SETUSER nsm on >PASSWORD (.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert block is not None
    return block[1].split()


def test_the_documented_rights_cover_every_command_of_a_script() -> None:
    scripts = "".join(path.read_text() for path in Path(service.__file__).parent.rglob("*.lua"))
    commands = {name.lower() for name in re.findall(r"redis\.call\('(\w+)'", scripts)}
    assert len(commands) > 20
    assert commands <= {rule.removeprefix("+") for rule in documented_acl_rules()}


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
    async with opened_redis(acl_user.replace("://", "://nsm:p%40ss@")) as store:
        await every_call(store)


@pytest.mark.parametrize(("password", "options"), [("wrong", ""), ("p%40ss", "?prefix=others")])
async def test_a_user_who_may_not_is_refused_at_start(acl_user: str, password: str, options: str) -> None:
    with pytest.raises(ConfigError, match="refuses the user") as caught:
        async with opened_redis(acl_user.replace("://", f"://nsm:{password}@") + options):
            pass
    assert "wrong" not in str(caught.value)


async def test_a_database_that_is_not_there_is_refused_at_start(redis_single: Topology) -> None:
    with pytest.raises(ConfigError, match="/99: the session store has no database of the number"):
        async with opened_redis(f"{redis_single.url}/99"):
            pass


async def every_call(store: RedisSessionStore) -> None:
    head = await create(store, ttl_s=100.0)
    head = await commit(store, head)
    lease = await store.renew((await acquire(store)).lease, lease_s=1.0)
    empty = {"snapshot": None, "position": 0, "model_fingerprint": "m1", "num_log_tokens": 0}
    await store.rewind(lease, Rewind(expected_version=1, **empty, num_sampled=0, seed=None))
    await store.release((await acquire(store)).lease)
    await store.update(KEY, ttl_s=None)
    assert (await store.load(KEY)).snapshot is None
    assert await store.read_log(KEY) == ()
    assert len(await store.log_marks(KEY)) == 1
    page = await store.list(tenant="a", limit=1)
    assert len(page.heads) == (await store.usage(tenant="a")).num_sessions == 1
    assert await store.list_tenants() == ("a",)
    await store.check_writable()
    for number in range(2):  # the second finds the record of the first
        names = {"turn_id": f"t{number}", "identity": None, "digest": "d", "model_fingerprint": "m1"}
        start = TurnStart(**names, base_version=None, request=b"{}")
        leased = await store.acquire(KEY, holder="h", lease_s=1.0, start=start, max_records=1)
        await store.append_turn(leased.lease, start.turn_id, index=0, chunk=b"x")
        await store.end_turn(leased.lease, EndedTurn(turn_id=start.turn_id, result=b"", ttl_s=1.0), status="failed")
        await store.release(leased.lease)
    states = RedisStateStore(store)
    new_state = NewState(file=b"s", model_fingerprint="m", position=1, num_tokens=1, source="text")
    await states.add(tenant="a", name="rules", state=new_state)
    assert await states.get(tenant="a", name="rules") is not None
    assert await states.delete(tenant="a", name="rules") == 1
    await store.delete(KEY)


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
        async with opened_redis(f"{url}?tls_ca={tmp_path}/cert.pem") as store:
            await every_call(store)
        with pytest.raises(Exception, match="cannot be reached"):
            async with opened_redis(url):
                pass
        with pytest.raises(ConfigError, match="there is no file"):
            async with opened_redis(f"{url}?tls_ca=/nowhere.pem"):
                pass
    finally:
        topology.stop()
