"""Commands to Redis, in whatever topology: a bounded number at once, repeated while that can help, with our errors.

Everything sent through here may safely be sent twice: the scripts recognise a call that they have seen. redis-py itself
repeats nothing, and closes a connection whose command was cancelled before its answer was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.maint_notifications import MaintNotificationsConfig

from nsm_core.errors import ConfigError, StorageFull, StoreUnavailable
from service.stores.redis.connection import ShortConnection, ShortPool, ShortRedis, ShortSSLConnection
from service.stores.redis.errors import ERRORS, is_passing, translate
from service.stores.redis.scripts import Script
from service.stores.redis.url import RedisAddress

Result = TypeVar("Result")

PATIENCE_S = 1.0  # no attempt begins later than this after the first one
COMMIT_PATIENCE_S = 5.0  # a turn's work is at stake, and its lease lives longer than this
FIRST_PAUSE_S = 0.02  # between attempts; doubles, with jitter
MAX_PAUSE_S = 0.5
READ_BYTES = 1024 * 1024  # at once: snapshots are megabytes
PIECE_BYTES = 16 * 1024 * 1024  # of a value that is written: the server answers nobody else meanwhile
KEYS_AT_ONCE = 1000  # of a scan: the server answers nobody else meanwhile
HEALTH_CHECK_S = 15  # an idle connection is pinged before it is used again
UNBOUNDED = 2**31  # of redis-py's pools: ours is the bound


class Attempt:
    """One attempt of a call: the commands it may use. `number` counts from 1."""

    def __init__(self, redis: Any, number: int, *, max_value_bytes: int) -> None:
        self._redis = redis
        self._max_value_bytes = max_value_bytes
        self.number = number

    async def command(self, *args: Any) -> Any:
        self._require_small(args)
        return await self._redis.execute_command(*args)

    async def infos(self) -> dict[str, Any]:
        """INFO of each server that may come to hold sessions, by its address; of a cluster's, those that answer."""
        if not isinstance(self._redis, RedisCluster):
            return {"": await self.command("INFO")}
        await self._redis.initialize()
        answers, unreachable = {}, None
        for node in self._redis.get_nodes():
            try:
                answer = await self._redis.execute_command("INFO", target_nodes=node)
                answers[node.name] = answer.get(node.name, answer)
            except ERRORS as error:
                if not is_passing(error):
                    raise
                unreachable = error
        if unreachable is not None and not answers:
            raise unreachable
        return answers

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """The names of all keys that fit, on whatever server; one may come twice."""
        async for key in self._redis.scan_iter(match=pattern, count=KEYS_AT_ONCE):
            yield key

    async def script(self, script: Script, keys: Sequence[str], *args: Any) -> Any:
        try:
            return await self.command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:  # a restarted server has forgotten it
            return await self.command("EVAL", script.text, len(keys), *keys, *args)

    async def together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers of several commands in one round trip to each server, not atomic."""
        if self.number > 1:  # after a failover only a command by itself makes redis-py look where the slots are now
            return [await self.command(*command) for command in commands]
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            self._require_small(command)
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _require_small(self, args: tuple[Any, ...]) -> None:
        """Raises StorageFull. A command that is huge would fill the server's buffers and hold up everybody's commands,
        and a value beyond `proto-max-bulk-len` is not taken at all.
        """
        num_bytes = max(len(arg) for arg in args if isinstance(arg, bytes | str))
        if num_bytes > self._max_value_bytes:
            raise StorageFull(
                f"a value of {num_bytes} bytes is more than the session store takes (max_value_bytes of NSM_STORE is "
                f"{self._max_value_bytes})",
                retry_after_s=None,
            )

    async def set_in_pieces(self, key: str, value: bytes, *, expire_s: int) -> None:
        """A value at a key that only this attempt writes; it is whole when this returns. Raises StorageFull.

        What is large comes in several commands, between which the server serves others.
        """
        self._require_small((value,))
        await self.command("SET", key, value[:PIECE_BYTES], "EX", expire_s)
        for start in range(PIECE_BYTES, len(value), PIECE_BYTES):
            piece = value[start : start + PIECE_BYTES]
            await self.together(("SETRANGE", key, start, piece), ("EXPIRE", key, expire_s))

    async def script_and_get(self, script: Script, keys: Sequence[str], *args: Any, key: str) -> tuple[Any, Any]:
        """A script's answer and then a value, in one round trip: megabytes do not pass through Lua."""
        get = ("GET", key)
        try:
            answer, value = await self.together(("EVALSHA", script.sha, len(keys), *keys, *args), get)
        except NoScriptError:
            answer, value = await self.together(("EVAL", script.text, len(keys), *keys, *args), get)
        return answer, value


class RedisClient:
    """The connections of one store. `num_in_use`: commands that run now, at most the address's `max_connections`."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self.num_in_use = 0
        self._redis: Any = None
        self._close: Callable[[], Awaitable[None]] | None = None
        self._gate = asyncio.Semaphore(address.max_connections)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def connect(self) -> None:
        """The client, which connects with its first command. Raises ConfigError for a TLS file that is not there."""
        for path in (self.address.tls_ca, self.address.tls_cert, self.address.tls_key):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"NSM_STORE (--store): there is no file {path}")
        self._redis, self._close = _make_client(self.address)

    async def close(self) -> None:
        """Nothing new begins, what runs ends, and no connection is left open. Idempotent."""
        close, self._close, self._redis = self._close, None, None
        if close is None:
            return
        try:
            # A command that is still connecting would leave behind a connection that nobody closes. Each has its
            # time-out, so this ends.
            await self._is_idle.wait()
        finally:
            with contextlib.suppress(*ERRORS):
                await close()

    async def call(self, work: Callable[[Attempt], Awaitable[Result]], *, patience_s: float = PATIENCE_S) -> Result:
        """`work`, again while it fails with what passes. Raises StoreUnavailable or StorageFull."""
        start, pause_s, number = time.monotonic(), FIRST_PAUSE_S, 1
        while True:
            try:
                async with self._one_of_the_connections(), _cancelled_in_any_case():
                    return await work(Attempt(self._redis, number, max_value_bytes=self.address.max_value_bytes))
            except ERRORS as error:
                elapsed_s = time.monotonic() - start
                if not is_passing(error) or elapsed_s + pause_s > patience_s:
                    translated = translate(error, is_tls=self.address.is_tls)
                    translated.add_note(str(self.address))
                    raise translated from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s, number = min(2 * pause_s, MAX_PAUSE_S), number + 1

    async def command(self, *args: Any) -> Any:
        """One command that may be repeated."""
        return await self.call(lambda attempt: attempt.command(*args))

    async def script(self, script: Script, keys: Sequence[str], *args: Any, patience_s: float = PATIENCE_S) -> Any:
        """One script that recognises a repeated call."""
        return await self.call(lambda attempt: attempt.script(script, keys, *args), patience_s=patience_s)

    @contextlib.asynccontextmanager
    async def _one_of_the_connections(self) -> AsyncIterator[None]:
        self._require_open()
        if self._gate.locked():
            await self._wait_for_one()
        else:
            await self._gate.acquire()
        self.num_in_use += 1
        self._is_idle.clear()
        try:
            self._require_open()  # it may have been closed meanwhile
            yield
        finally:
            self.num_in_use -= 1
            self._gate.release()
            if not self.num_in_use:
                self._is_idle.set()

    async def _wait_for_one(self) -> None:
        try:
            async with asyncio.timeout(self.address.pool_timeout_s):
                await self._gate.acquire()
        except TimeoutError:
            message = f"all {self.address.max_connections} connections to the session store are in use"
            raise StoreUnavailable(message) from None

    def _require_open(self) -> None:
        if self._redis is None:
            raise StoreUnavailable("the session store is not open")


@contextlib.asynccontextmanager
async def _cancelled_in_any_case() -> AsyncIterator[None]:
    """Before Python 3.12 `asyncio.wait_for`, which redis-py uses, may swallow the cancel of its task."""
    task = asyncio.current_task()
    num_cancels = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > num_cancels:
            raise asyncio.CancelledError


def _make_client(address: RedisAddress) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """The client and what closes it."""
    options = _connection_options(address)
    if address.topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        cluster = RedisCluster(
            startup_nodes=nodes, max_connections=UNBOUNDED, ssl=address.is_tls, **options, **_tls_options(address)
        )
        return cluster, cluster.aclose
    options["db"] = address.database
    if address.topology == "sentinel":
        return _make_sentinel_client(address, options)
    (host, port), tls = address.nodes[0], _tls_options(address)
    kind = ShortSSLConnection if address.is_tls else ShortConnection
    pool = ShortPool(kind, max_connections=UNBOUNDED, host=host, port=port, **options, **tls)
    return ShortRedis(connection_pool=pool), pool.aclose


def _make_sentinel_client(address: RedisAddress, options: dict[str, Any]) -> tuple[Any, Callable[[], Awaitable[None]]]:
    tls = {"ssl": True, **_tls_options(address)} if address.is_tls else {}
    to_sentinels = {
        **{name: value for name, value in options.items() if name not in ("username", "password", "db")},
        "username": address.sentinel_username,
        "password": address.sentinel_password,
        "socket_timeout": address.connect_timeout_s,  # one that hangs must not hold up the others
        **tls,
    }
    sentinel = Sentinel(list(address.nodes), sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]
    master: Any = sentinel.master_for(address.service or "", max_connections=UNBOUNDED, **options, **tls)

    async def close() -> None:
        clients = (master, *sentinel.sentinels)
        closings = [closing() for client in clients for closing in (client.aclose, client.connection_pool.aclose)]
        ends = await asyncio.gather(*closings, return_exceptions=True)  # one that fails must not keep the others open
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    return master, close


def _connection_options(address: RedisAddress) -> dict[str, Any]:
    return {
        "username": address.username,
        "password": address.password,
        "protocol": 3,
        "client_name": f"nsm-{os.getpid()}",
        "socket_timeout": address.socket_timeout_s,
        "socket_connect_timeout": address.connect_timeout_s,
        "socket_keepalive": True,
        "socket_read_size": READ_BYTES,
        "health_check_interval": HEALTH_CHECK_S,
        "retry": Retry(NoBackoff(), 0),
        # With them on, redis-py would no longer look for stray answers before it uses a connection again.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def _tls_options(address: RedisAddress) -> dict[str, Any]:
    if not address.is_tls:
        return {}
    return {
        "ssl_ca_certs": address.tls_ca,
        "ssl_certfile": address.tls_cert,
        "ssl_keyfile": address.tls_key,
        "ssl_check_hostname": address.tls_check_hostname,
    }
