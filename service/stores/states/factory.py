"""From a session store to the store of named states on its connections."""

from __future__ import annotations

from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.states.base import StateStore
from service.stores.states.sqlite import SqliteStateStore


def states_beside(sessions: SessionStore) -> StateStore:
    """Named states live where the sessions live. Raises TypeError for a store of another kind."""
    if isinstance(sessions, SqliteSessionStore):
        return SqliteStateStore(sessions)
    from service.stores.sessions.redis import RedisSessionStore
    from service.stores.states.redis import RedisStateStore  # its library takes a fifth of a second to import

    if isinstance(sessions, RedisSessionStore):
        return RedisStateStore(sessions)
    raise TypeError(f"no store of named states lives beside a {type(sessions).__name__}")
