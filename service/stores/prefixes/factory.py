"""From the settings to a store of prefixes."""

from __future__ import annotations

from service.settings import Settings
from service.stores.prefixes.base import PrefixBounds, PrefixStore
from service.stores.prefixes.memory import MemoryPrefixStore

MIB = 2**20
TTL_S = 3600.0  # of an entry since its last use: longer than the pause between two messages of a chat


def make_prefix_store(settings: Settings) -> PrefixStore:
    """In Redis when the sessions are there, else in this process's memory. Raises ConfigError for a bad URL."""
    bounds = bounds_of(settings)
    if settings.is_redis:
        from service.stores.prefixes.redis import RedisPrefixStore  # its library takes a fifth of a second to import
        from service.stores.redis.url import parse_redis_url

        return RedisPrefixStore(parse_redis_url(settings.store), bounds)
    return MemoryPrefixStore(bounds)


def bounds_of(settings: Settings) -> PrefixBounds:
    return PrefixBounds(max_bytes=settings.prefix_cache_mb * MIB, ttl_s=TTL_S)
