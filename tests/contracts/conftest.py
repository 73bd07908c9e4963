from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.sessions.base import SessionStore
from service.sessions.memory import MemorySessionStore
from service.sessions.sqlite import SqliteSessionStore
from tests.stored_sessions import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[SessionStore]:
    made: SessionStore
    if request.param == "memory":
        made = MemorySessionStore(clock=clock)
    else:
        made = SqliteSessionStore(tmp_path / "data" / "sessions.db", clock=clock)
    await made.open()
    yield made
    await made.close()
