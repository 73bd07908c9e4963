"""From a session store to the record store on its connections."""

from __future__ import annotations

from service.stores.records.base import RecordStore
from service.stores.records.sqlite import SqliteRecordStore
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore


def records_beside(sessions: SessionStore) -> RecordStore:
    """Documents live where the sessions live. Raises TypeError for a store of another kind."""
    if isinstance(sessions, SqliteSessionStore):
        return SqliteRecordStore(sessions)
    from service.stores.records.redis import RedisRecordStore  # its library takes a fifth of a second to import
    from service.stores.sessions.redis import RedisSessionStore

    if isinstance(sessions, RedisSessionStore):
        return RedisRecordStore(sessions)
    raise TypeError(f"no record store lives beside a {type(sessions).__name__}")
