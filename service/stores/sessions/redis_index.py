"""A tenant's sessions in Redis: for listings and quotas. In a cluster it lives on another server than the sessions.

The heads are the truth. An entry is made before its head and removed after it, so that no session is ever unlisted;
what a crash leaves in between, listings drop. The usage is exact when nothing was interrupted, and else from a
session's next commit on.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from nsm_core.errors import NsmError
from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import INDEX_FORGET, INDEX_PAGE, INDEX_PUT, INDEX_RESERVE, INDEX_USAGE
from service.stores.sessions.base import SessionHead, TenantUsage
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis_fields import MICROSECONDS, StoredHead, optional_us, to_us

logger = logging.getLogger("nsm.store")

STALE_AFTER_S = 60.0  # an entry without a head that is younger may be of a session that is being made


@dataclasses.dataclass(frozen=True, slots=True)
class IndexEntry:
    session_id: str
    created_at: float


class TenantIndex:
    """Each call is one script."""

    def __init__(self, client: RedisClient, keys: Keyspace) -> None:
        self._client = client
        self._keys = keys

    async def reserve(self, key: SessionKey) -> int:
        """Before a session is made; the index's time in microseconds, which the session is dated with."""
        return int(await self._client.script(INDEX_RESERVE, self._keys.tenant(key.tenant), key.session_id))

    async def put(self, stored: StoredHead) -> None:
        """After a head moved. The head is safe by now: a failure here goes to the log alone."""
        head = stored.head
        values = (to_us(head.created_at), head.version, stored.num_bytes, optional_us(head.expires_at))
        try:
            await self._client.script(INDEX_PUT, self._keys.tenant(head.tenant), head.session_id, *values)
        except NsmError as error:
            logger.warning("a tenant's usage is behind until the session's next commit: %s", error)

    async def forget(self, head: SessionHead) -> None:
        """After a session was deleted. On failure the next listing does it."""
        try:
            await self._forget(head.tenant, IndexEntry(head.session_id, head.created_at), untouched_for_s=0.0)
        except NsmError as error:
            logger.warning("a deleted session's entry stays until the next listing: %s", error)

    async def drop_stale(self, tenant: str, entry: IndexEntry) -> None:
        """An entry whose head was not found, unless it is new."""
        await self._forget(tenant, entry, untouched_for_s=STALE_AFTER_S)

    async def _forget(self, tenant: str, entry: IndexEntry, *, untouched_for_s: float) -> None:
        values = (entry.session_id, to_us(entry.created_at), to_us(untouched_for_s))
        await self._client.script(INDEX_FORGET, self._keys.tenant(tenant), *values)

    async def has_expired(self, key: SessionKey) -> bool:
        """Whether a session that is not there was ended by its TTL, as far as the index remembers."""
        _, _, expiry, _, expired = self._keys.tenant(key.tenant)
        reads = (("ZSCORE", expiry, key.session_id), ("ZSCORE", expired, key.session_id))
        due_us, ended_us = await self._client.call(lambda attempt: attempt.together(*reads))
        return ended_us is not None or (due_us is not None and float(due_us) <= time.time() * MICROSECONDS)

    async def page(self, tenant: str, *, limit: int, after: IndexEntry | None) -> list[IndexEntry]:
        """Newest first, at most `limit`; some may be stale."""
        start = ("", "") if after is None else (to_us(after.created_at), after.session_id)
        flat = await self._client.script(INDEX_PAGE, self._keys.tenant(tenant), *start, limit)
        names = zip(flat[::2], flat[1::2], strict=True)
        return [IndexEntry(name.decode(), int(created_us) / MICROSECONDS) for name, created_us in names]

    async def tenants(self) -> tuple[str, ...]:
        """All there are, sorted. Goes through the names of all keys: an index has only the hash of its tenant's."""

        async def work(attempt: Attempt) -> set[str]:
            heads = {self._keys.tenant_tag(key): key async for key in attempt.scan(self._keys.any_head)}
            names = [await attempt.command("HGET", key, "tenant") for key in heads.values()]
            return {name.decode() for name in names if name is not None}

        return tuple(sorted(await self._client.call(work)))

    async def usage(self, tenant: str) -> TenantUsage:
        num_sessions, num_bytes = await self._client.script(INDEX_USAGE, self._keys.tenant(tenant))
        return TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)
