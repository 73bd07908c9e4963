from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.redis_servers import RedisClock, Topology, own_prefix
from tests.support.stored_sessions import Clock

REDIS = ("redis_single", "redis_cluster", "redis_sentinel")


@pytest.fixture(params=["memory", "sqlite", *(pytest.param(name, marks=pytest.mark.redis) for name in REDIS)])
def store_and_clock(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[SessionStore, Clock | RedisClock]:
    """A store that is not open yet, and what makes time pass for it."""
    if request.param in REDIS:
        topology: Topology = request.getfixturevalue(request.param)
        prefix = own_prefix()
        return RedisSessionStore(parse_redis_url(topology.url_with(prefix=prefix))), RedisClock(topology, prefix)
    clock = Clock()
    if request.param == "memory":
        return SqliteSessionStore(None, clock=clock), clock
    return SqliteSessionStore(tmp_path / "data" / "sessions.db", clock=clock), clock


@pytest.fixture
def clock(store_and_clock: tuple[SessionStore, Clock | RedisClock]) -> Clock | RedisClock:
    return store_and_clock[1]


@pytest.fixture
async def store(store_and_clock: tuple[SessionStore, Clock | RedisClock]) -> AsyncIterator[SessionStore]:
    made = store_and_clock[0]
    await made.open()
    yield made
    await made.close()
