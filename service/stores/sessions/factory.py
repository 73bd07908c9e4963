"""From the settings to a store."""

from __future__ import annotations

from service.settings import Settings
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore


def make_store(settings: Settings) -> SessionStore:
    """The store that the settings name; a new kind of store is a new case here. Raises ConfigError for a bad URL."""
    if settings.is_redis:
        return RedisSessionStore(parse_redis_url(settings.store))
    return SqliteSessionStore(settings.database_path())
