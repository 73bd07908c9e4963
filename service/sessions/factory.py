"""From the settings to a store."""

from __future__ import annotations

from service.sessions.base import SessionStore
from service.sessions.memory import MemorySessionStore
from service.sessions.redis import RedisSessionStore
from service.sessions.redis_url import parse_redis_url
from service.sessions.sqlite import SqliteSessionStore
from service.settings import Settings


def make_store(settings: Settings) -> SessionStore:
    """The store that the settings name; a new kind of store is a new case here. Raises ConfigError for a bad URL."""
    if settings.is_redis:
        return RedisSessionStore(parse_redis_url(settings.store))
    path = settings.database_path()
    return MemorySessionStore() if path is None else SqliteSessionStore(path)
