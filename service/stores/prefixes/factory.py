"""From the settings to a store of prefixes."""

from __future__ import annotations

from service.settings import Settings
from service.stores.prefixes.base import PrefixBounds, PrefixStore
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.redis import RedisPrefixStore
from service.stores.prefixes.sqlite import SqlitePrefixStore
from service.stores.redis.url import parse_redis_url

FILE = "prefixes.db"
MIB = 2**20


def make_prefix_store(settings: Settings) -> PrefixStore:
    """Where the sessions are, but in keys or a file of its own. Raises ConfigError for a bad URL."""
    bounds = bounds_of(settings)
    if settings.is_redis:
        return RedisPrefixStore(parse_redis_url(settings.store), bounds)
    database = settings.database_path()
    return MemoryPrefixStore(bounds) if database is None else SqlitePrefixStore(database.parent / FILE, bounds)


def bounds_of(settings: Settings) -> PrefixBounds:
    max_bytes = settings.prefix_cache_mb * MIB
    tenant_mb = settings.prefix_cache_tenant_mb
    return PrefixBounds(
        max_bytes=max_bytes,
        max_tenant_bytes=max_bytes if tenant_mb is None else min(max_bytes, tenant_mb * MIB),
        ttl_s=settings.prefix_cache_ttl_s,
    )
