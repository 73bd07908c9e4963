"""From a session store to the record store on its connections."""

from __future__ import annotations

from service.records.base import RecordStore
from service.records.memory import MemoryRecordStore
from service.records.redis import RedisRecordStore
from service.records.sqlite import SqliteRecordStore
from service.sessions.base import SessionStore
from service.sessions.redis import RedisSessionStore
from service.sessions.sqlite import SqliteSessionStore


def records_beside(sessions: SessionStore) -> RecordStore:
    """Documents live where the sessions live; beside a store of another kind they are kept in memory."""
    if isinstance(sessions, SqliteSessionStore):
        return SqliteRecordStore(sessions)
    if isinstance(sessions, RedisSessionStore):
        return RedisRecordStore(sessions)
    return MemoryRecordStore()
