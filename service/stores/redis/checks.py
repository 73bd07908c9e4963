"""Requirements on a Redis that holds sessions, and on its room for their turns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nsm_core.errors import ConfigError, StorageFull, StoreUnavailable
from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.errors import is_refusal
from service.stores.redis.keys import Keyspace
from service.stores.sessions.base import StoreRoom

logger = logging.getLogger("nsm.store")

OLDEST_SERVER = (7, 0)  # scripts declare their behaviour on a full server
LAYOUT_VERSION = 3  # of the keys and their values
# In 1, heads do not name their snapshots; in 1 and 2, all turn records of a session are one value. Both are read, and
# written as in the newest layout.
OLDER_LAYOUTS = ("1", "2")


async def check_server(client: RedisClient, keys: Keyspace) -> Mapping[str, Mapping[str, Any]]:
    """What each server reports of itself, by its name.

    Raises ConfigError (server too old, may drop sessions, refuses us, unknown key layout) or StoreUnavailable.
    """
    try:
        answers = await client.call(lambda attempt: attempt.infos())
        infos = {name or str(client.address): info for name, info in answers.items()}
        for name, info in infos.items():
            _check_node(name, info)
        await client.call(lambda attempt: _check_layout(attempt, keys))
    except StoreUnavailable as error:
        if error.__cause__ is not None and is_refusal(error.__cause__):
            raise ConfigError(f"NSM_STORE (--store): {client.address}: {error}") from error
        raise StoreUnavailable(f"{client.address}: {error}", retry_after_s=error.retry_after_s) from error
    return infos


def warn_of_losses(infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Logs what would lose turns on these servers."""
    for name, info in infos.items():
        if not int(info.get("aof_enabled", 0)):
            logger.warning("the Redis server %s has no append-only file: a crash loses committed turns", name)


def _check_node(name: str, info: Mapping[str, Any]) -> None:
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise ConfigError(f"the Redis server {name} has version {version}; {oldest} or later is needed")
    policy = info.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise ConfigError(
            f"the Redis server {name} has maxmemory-policy {policy}, which may drop sessions; set it to noeviction"
        )


async def require_room(client: RedisClient, num_bytes: int) -> None:
    """Raises StorageFull when no server that holds sessions has so much left of its maxmemory.

    A small write is no proof: the server counts the received part of a large one before it decides.
    """
    infos = await client.call(lambda attempt: attempt.infos())
    if not any(_has_room(info, num_bytes) for info in infos.values() if info.get("role") == "master"):
        raise StorageFull("the session store is full: Redis nearly reached its maxmemory")


def _has_room(info: Mapping[str, Any], num_bytes: int) -> bool:
    limit = int(info.get("maxmemory", 0))
    return limit == 0 or _used(info) + num_bytes <= limit


def _used(info: Mapping[str, Any]) -> int:
    """The bytes that count against maxmemory."""
    return int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))


async def least_room(client: RedisClient) -> StoreRoom | None:
    """Of the server with the smallest share left: a session lies on one of them. None where none has a maxmemory."""
    infos = await client.call(lambda attempt: attempt.infos())
    bounded = [info for info in infos.values() if info.get("role") == "master" and int(info.get("maxmemory", 0))]
    rooms = [(max(0, int(info["maxmemory"]) - _used(info)), int(info["maxmemory"])) for info in bounded]
    if not rooms:
        return None
    num_free, num_bytes = min(rooms, key=lambda room: room[0] / room[1])
    return StoreRoom(kind="redis", num_free=num_free, num_bytes=num_bytes)


async def _check_layout(attempt: Attempt, keys: Keyspace) -> None:
    await attempt.command("SET", keys.layout_version, LAYOUT_VERSION, "NX")
    found = (await attempt.command("GET", keys.layout_version)).decode(errors="replace")
    if found in OLDER_LAYOUTS:
        # From now on a build that knows only older layouts does not start here
        await attempt.command("SET", keys.layout_version, LAYOUT_VERSION)
    elif found != str(LAYOUT_VERSION):
        raise ConfigError(
            f"the sessions in Redis have key layout version {found}, this build knows version {LAYOUT_VERSION}"
        )
