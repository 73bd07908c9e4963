"""Prefixes in Redis or Valkey, shared by all gateways.

Sessions live beside them, on a server that drops nothing by itself: so this bounds itself, also to a share of the
server's memory, and every entry has an expiry of its own. The names are in one index under one hash tag, and each of
its transitions is one script; entries are keys of their own, spread over a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

from redis.exceptions import NoScriptError

from nsm_core.errors import NsmError, StoreUnavailable
from nsm_core.hashing import identity_of
from service.stores.prefixes.base import PrefixBounds, PrefixKey, PrefixUsage
from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.scripts import Script, load_script
from service.stores.redis.url import RedisAddress

MEMORY_SHARE = 4  # at most a quarter of the server's maxmemory: the rest is the sessions'
NO_PATIENCE_S = 0.0  # an attempt that fails is a miss
MICROSECONDS = 1_000_000
MAX_CONNECTIONS = 8


def _load(name: str) -> Script:
    return load_script(name, "index", package="service.stores.prefixes")


FIND = _load("find")
TOUCH = _load("touch")
PUT = _load("put")
FORGET = _load("forget")
EXPIRE = _load("expire")


class RedisPrefixStore:
    """The shared PrefixStore."""

    def __init__(self, address: RedisAddress, bounds: PrefixBounds) -> None:
        connections = min(address.max_connections, MAX_CONNECTIONS)
        self._client = RedisClient(dataclasses.replace(address, max_connections=connections))
        self._bounds = bounds
        self._prefix = address.prefix
        tag = f"{address.prefix}:{{prefixes}}"
        self._index = tuple(f"{tag}:{name}" for name in ("names", "used", "bytes", "tenants"))
        self._ttl_us = round(bounds.ttl_s * MICROSECONDS)

    async def open(self) -> None:
        self._client.connect()
        infos = await self._client.call(lambda attempt: attempt.infos())
        limits = [int(info.get("maxmemory", 0)) for info in infos.values() if info.get("role") == "master"]
        if limits and all(limits):
            share = sum(limits) // MEMORY_SHARE
            self._bounds = dataclasses.replace(self._bounds, max_bytes=min(self._bounds.max_bytes, share))

    async def close(self) -> None:
        await self._client.close()

    async def find(self, *, tenant: str, family: str) -> tuple[PrefixKey, ...]:
        start = f"{_hash(tenant)}:{family}:"
        names = await self._script(FIND, start, self._ttl_us)
        return tuple(_key(name, start) for name in names)

    async def load(self, *, tenant: str, key: PrefixKey) -> bytes | None:
        name, entry = _name(tenant, key), self._entry(tenant, key)

        async def work(attempt: Attempt) -> tuple[Any, Any]:
            get = ("GETEX", entry, "PX", self._ttl_us // 1000)
            touch = (len(self._index), *self._index, name, self._ttl_us)
            try:
                live, value = await attempt.together(("EVALSHA", TOUCH.sha, *touch), get)
            except NoScriptError:
                live, value = await attempt.together(("EVAL", TOUCH.text, *touch), get)
            return live, value

        live, value = await self._client.call(work, patience_s=NO_PATIENCE_S)
        if live and isinstance(value, bytes):
            return value
        await self.remove(tenant=tenant, key=key)
        return None

    async def put(self, *, tenant: str, key: PrefixKey, entry: bytes) -> None:
        bounds, name = self._bounds, self._entry(tenant, key)
        if len(entry) > bounds.max_bytes:
            return
        await self._command("SET", name, entry, "PX", self._ttl_us // 1000)
        try:
            dropped = await self._script(PUT, _name(tenant, key), len(entry), bounds.max_bytes, self._ttl_us)
        except NsmError:  # without a name it would not be found, and not be counted
            with contextlib.suppress(NsmError):
                await self._command("UNLINK", name)
            raise
        await self._delete(dropped)

    async def remove(self, *, tenant: str, key: PrefixKey) -> None:
        await self._script(FORGET, _name(tenant, key))
        await self._command("UNLINK", self._entry(tenant, key))

    async def usage(self, *, tenant: str) -> PrefixUsage:
        owner = _hash(tenant)
        names, _, _, tenants = self._index
        num_entries = await self._command("ZLEXCOUNT", names, f"[{owner}:", f"({owner}g")
        num_bytes = await self._command("ZSCORE", tenants, owner)
        return PrefixUsage(num_entries=int(num_entries), num_bytes=int(num_bytes or 0))

    async def remove_expired(self) -> int:
        num_removed = 0
        while dropped := await self._script(EXPIRE, self._ttl_us):
            await self._delete(dropped)
            num_removed += len(dropped)
        return num_removed

    async def _delete(self, names: Iterable[bytes]) -> None:
        """The entries of names that a script has dropped."""
        commands = [("UNLINK", self._entry_of(name.decode())) for name in names]
        if commands:
            await self._client.call(lambda attempt: attempt.together(*commands), patience_s=NO_PATIENCE_S)

    async def _script(self, script: Script, *args: Any) -> Any:
        return await self._client.script(script, self._index, *args, patience_s=NO_PATIENCE_S)

    async def _command(self, *args: Any) -> Any:
        return await self._client.call(lambda attempt: attempt.command(*args), patience_s=NO_PATIENCE_S)

    def _entry(self, tenant: str, key: PrefixKey) -> str:
        return self._entry_of(_name(tenant, key))

    def _entry_of(self, name: str) -> str:
        """The key of an entry, which holds the tenant; without a hash tag, it may be on any server of a cluster."""
        return f"{self._prefix}:prefix:{name}"


def _name(tenant: str, key: PrefixKey) -> str:
    return f"{_hash(tenant)}:{key.family}:{key.position}:{key.digest}"


def _key(name: bytes, start: str) -> PrefixKey:
    """Raises StoreUnavailable for a name of another tenant or family: an answer that went astray is never used."""
    _, family, _ = start.split(":")
    try:
        position, digest = name.decode().removeprefix(start).split(":")
        return PrefixKey(family=family, position=int(position), digest=digest)
    except ValueError as error:
        raise StoreUnavailable("the stored prefixes gave an unexpected answer") from error


def _hash(tenant: str) -> str:
    """16 letters from 0-9 and a-f: no character of a tenant's name gets into a key."""
    return identity_of(tenant, num_bytes=8)
