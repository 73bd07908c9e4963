"""What there is in the Redis store: pages of sessions, tenants, and what they take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nsm_core.errors import InvalidRequest
from service.messages import quoted
from service.stores.redis.client import RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.sessions.base import SessionHead, SessionPage, TenantUsage
from service.stores.sessions.records import decode_cursor, encode_cursor
from service.stores.sessions.redis_index import IndexEntry, TenantIndex
from service.stores.sessions.redis_records import decode_head


class RedisListing:
    """The calls of a SessionStore that look at more than one session.."""

    def __init__(self, client: RedisClient, keys: Keyspace, index: TenantIndex) -> None:
        self._client = client
        self._keys = keys
        self._index = index

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        place = None if cursor is None else _place(cursor)
        heads: list[SessionHead] = []
        while len(heads) <= limit:
            entries = await self._index.page(tenant, limit=limit + 1 - len(heads), after=place)
            if not entries:
                break
            heads += await self._living(tenant, entries)
            place = entries[-1]
        page = tuple(heads[:limit])
        return SessionPage(heads=page, next_cursor=encode_cursor(page[-1]) if len(heads) > limit else None)

    async def _living(self, tenant: str, entries: Sequence[IndexEntry]) -> Sequence[SessionHead]:
        """The heads of `entries`; what is found to be out of date in the index is put right."""
        reads = [("HGETALL", self._keys.session(tenant, entry.session_id).head) for entry in entries]
        answers = await self._client.call(lambda attempt: attempt.together(*reads))
        heads = []
        for entry, answer in zip(entries, answers, strict=True):
            stored = decode_head(answer, tenant=tenant, session_id=entry.session_id)
            if stored is None:
                await self._index.drop_stale(tenant, entry)
            elif stored.head.created_at != entry.created_at:  # made again: it belongs to a page of newer ones
                await self._index.put(stored)
            else:
                heads.append(stored.head)
        return heads

    async def list_tenants(self) -> tuple[str, ...]:
        return await self._index.tenants()

    async def usage(self, *, tenant: str) -> TenantUsage:
        return await self._index.usage(tenant)


def _place(cursor: str) -> IndexEntry:
    created_at, session_id = decode_cursor(cursor)
    if not math.isfinite(created_at):
        raise InvalidRequest(f"after must be a next_cursor of an earlier page, got {quoted(cursor)}", param="after")
    return IndexEntry(session_id, created_at)
