"""Real Redis servers for tests: one, a cluster of three, and a pair watched by three Sentinels, on loopback."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

import pytest
import redis

SERVICE = "sessions"
START_S = 60.0  # for a server to answer, a cluster to form, a Sentinel to see the others
NUM_SLOTS = 16384
PR_SET_PDEATHSIG = 1

MAX_WORKERS = 16  # processes of one run whose ports differ

_prefixes = itertools.count()
_given: collections.deque[int] = collections.deque(maxlen=500)  # ports


def own_prefix() -> str:
    return f"test{next(_prefixes)}"


def free_port() -> int:
    """Below the ports that outgoing connections take; not the same in test runs side by side, whatever their seeds.

    In one run no two get the same soon, also while a server that was killed is about to come back at its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.SystemRandom().randrange(15_000 + worker % MAX_WORKERS, 30_000, MAX_WORKERS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.append(port)
                return port


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls: there is nothing to await in another program's start."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass  # not yet
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {START_S:g} s")
        time.sleep(0.02)


def die_with_the_tests() -> None:
    """In the new process: a test run that is killed leaves no servers behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RedisServer:
    """One process with its own directory. `options`: lines of its configuration, applied at every start."""

    def __init__(self, directory: Path, *options: str, is_sentinel: bool = False) -> None:
        self.directory = directory
        self.port = free_port()
        self.is_sentinel = is_sentinel
        self.process: subprocess.Popen[bytes] | None = None
        directory.mkdir()
        defaults = ["bind 127.0.0.1", f"port {self.port}", f"dir {directory}", "logfile log"]
        if not is_sentinel:
            defaults += ['save ""', "appendonly no", "repl-diskless-sync-delay 0", "repl-timeout 5"]
        (directory / "redis.conf").write_text("\n".join((*defaults, *options, "")))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5.0)

    def start(self) -> None:
        command = ["redis-server", str(self.directory / "redis.conf")]
        command = [*command, "--sentinel"] if self.is_sentinel else command
        self.process = subprocess.Popen(command, preexec_fn=die_with_the_tests)
        try:
            with self.client() as client:
                wait_until(lambda: self._answers(client), "the start of redis-server")
        except BaseException:
            self.kill()
            raise

    def _answers(self, client: redis.Redis) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended:\n{(self.directory / 'log').read_text()}")
        return bool(client.ping())

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Running servers and the NSM_STORE that leads to them."""

    url: str
    servers: tuple[RedisServer, ...]

    def own_url(self, **options: object) -> str:
        """Keys of its own for each call: a test finds the servers empty."""
        return self.url_with(prefix=own_prefix(), **options)

    def url_with(self, **options: object) -> str:
        return f"{self.url}?{urlencode(options)}"

    def stop(self) -> None:
        for server in self.servers:
            server.kill()


@contextlib.contextmanager
def killed_on_failure(servers: Sequence[RedisServer]) -> Iterator[None]:
    """A process that is left behind would be told of in some later test."""
    try:
        yield
    except BaseException:
        for server in servers:
            server.kill()
        raise


def start_single(directory: Path, *options: str) -> Topology:
    server = RedisServer(directory, *options)
    server.start()
    return Topology(server.url, (server,))


def start_cluster(directory: Path, *, has_replicas: bool = False) -> Topology:
    """Three primaries that share the slots; `has_replicas`: and a replica of each, listed after them."""
    directory.mkdir()
    servers = [_cluster_node(directory / str(number)) for number in range(6 if has_replicas else 3)]
    with killed_on_failure(servers):
        _form_cluster(servers)
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return Topology(f"redis+cluster://{hosts}", tuple(servers))


def _form_cluster(servers: Sequence[RedisServer]) -> None:
    for server in servers:
        server.start()
    primaries = servers[:3]
    for number, server in enumerate(primaries):
        with server.client() as client:
            client.execute_command(
                "CLUSTER", "ADDSLOTSRANGE", number * NUM_SLOTS // 3, (number + 1) * NUM_SLOTS // 3 - 1
            )
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    with primaries[0].client() as client:
        for server in servers[1:]:
            with server.client() as other:
                bus_port = other.config_get("cluster-port")["cluster-port"]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)
    for server in servers:
        _wait_for(server, lambda client: _knows_cluster(client, len(servers)), "the forming of the cluster")
    for primary, replica in zip(primaries, servers[3:], strict=False):
        with primary.client() as client:
            name = client.execute_command("CLUSTER", "MYID")
        with replica.client() as client:
            client.execute_command("CLUSTER", "REPLICATE", name)
        _wait_for(replica, _is_copied, "the replica's first copy")


def _cluster_node(directory: Path) -> RedisServer:
    return RedisServer(directory, "cluster-enabled yes", f"cluster-port {free_port()}", "cluster-node-timeout 1000")


def _wait_for(server: RedisServer, condition: Callable[[redis.Redis], bool], what: str) -> None:
    with server.client() as client:
        wait_until(lambda: condition(client), what)


def _knows_cluster(client: redis.Redis, num_nodes: int) -> bool:
    info = client.cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(num_nodes)


def _is_copied(client: redis.Redis) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")


def start_sentinel(directory: Path) -> Topology:
    """A master, a replica, and three Sentinels that need two votes."""
    directory.mkdir()
    master = RedisServer(directory / "master")
    replica = RedisServer(directory / "replica", f"replicaof 127.0.0.1 {master.port}")
    data = (master, replica)
    watch = (
        f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 2",
        f"sentinel down-after-milliseconds {SERVICE} 500",
        f"sentinel failover-timeout {SERVICE} 2000",
    )
    sentinels = [RedisServer(directory / f"sentinel{number}", *watch, is_sentinel=True) for number in range(3)]
    with killed_on_failure((*data, *sentinels)):
        for server in data:
            server.start()
        _wait_for(replica, _is_copied, "the replica's first copy")
        for sentinel in sentinels:
            sentinel.start()
        for sentinel in sentinels:
            _wait_for(sentinel, _sees_the_others, "the Sentinels' meeting")
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
    return Topology(f"redis+sentinel://{hosts}/{SERVICE}", (*data, *sentinels))


def _sees_the_others(client: redis.Redis) -> bool:
    master = client.sentinel_master(SERVICE)
    return master["num-other-sentinels"] == 2 and master["num-slaves"] == 1


class RedisClock:
    """The passing of time, for sessions under one prefix: what they wait for comes nearer."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        self._topology = topology
        self._prefix = prefix

    def advance(self, seconds: float) -> None:
        for server in self._topology.servers:
            with server.client() as client:
                if not server.is_sentinel and client.role()[0] == b"master":
                    for key in list(client.scan_iter(f"{self._prefix}:*")):
                        self._age(client, key, round(seconds * 1e6))

    def _age(self, client: redis.Redis, key: bytes, age_us: int) -> None:
        expires_ms = client.pexpiretime(key)
        age_value = {
            b"head": self._age_head, b"sizes": self._age_sizes, b"turns": self._age_turns, b"expiry": self._age_expiry
        }.get(key.rpartition(b":")[2])  # fmt: skip
        if age_value is not None:
            age_value(client, key, age_us)
        if expires_ms > 0:
            client.pexpireat(key, expires_ms - age_us // 1000)

    @staticmethod
    def _age_head(client: redis.Redis, key: bytes, age_us: int) -> None:
        for field in ("expires_us", "lease_us", "turns_us"):
            if client.hget(key, field) not in (b"", b"0"):
                client.hincrby(key, field, -age_us)

    @staticmethod
    def _age_sizes(client: redis.Redis, key: bytes, age_us: int) -> None:
        for session_id, entry in client.hgetall(key).items():
            *others, touched_us = entry.split(b":")
            client.hset(key, session_id, b":".join((*others, b"%d" % (int(touched_us) - age_us))))

    @staticmethod
    def _age_turns(client: redis.Redis, key: bytes, age_us: int) -> None:
        for field, value in client.hgetall(key).items():
            if field.startswith(b"t:"):
                turn = json.loads(value)
                turn["expires"] = str(int(turn["expires"]) - age_us)
                client.hset(key, field, json.dumps(turn))

    @staticmethod
    def _age_expiry(client: redis.Redis, key: bytes, age_us: int) -> None:
        for session_id in client.zrange(key, 0, -1):
            client.zincrby(key, -age_us, session_id)


@pytest.fixture(scope="session")
def redis_single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    yield from _running(start_single(tmp_path_factory.mktemp("redis") / "single"))


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    yield from _running(start_cluster(tmp_path_factory.mktemp("redis") / "cluster"))


@pytest.fixture(scope="session")
def redis_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    yield from _running(start_sentinel(tmp_path_factory.mktemp("redis") / "sentinel"))


def _running(topology: Topology) -> Iterator[Topology]:
    try:
        yield topology
    finally:
        topology.stop()
