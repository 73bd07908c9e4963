"""A tenant's sessions in Redis: for listings and quotas. In a cluster it lives on another server than the sessions.

The heads are the truth. An entry is made before its head and removed after it, so that no session is ever unlisted;
what a crash leaves in between, listings drop. The usage is exact when nothing was interrupted, and else from a
session's next commit on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence

from nsm_core.errors import NsmError
from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import INDEX_FORGET, INDEX_PAGE, INDEX_PUT, INDEX_RESERVE, INDEX_USAGE
from service.stores.sessions.base import SessionHead, TenantUsage
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis_fields import MICROSECONDS, StoredHead, decode_head, optional_us, to_us

logger = logging.getLogger("nsm.store")

BEHIND = "a tenant's usage is behind until the session's next commit: %s"
HEADS_AT_ONCE = 200
PUT_AFTER_S = 1.0  # of a turn's bytes: what a gateway that dies owes the index until the session's next turn
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
        self._waiting: set[SessionKey] = set()
        self._writing: asyncio.Task[None] | None = None

    async def reserve(self, key: SessionKey) -> int:
        """Before a session is made; the index's time in microseconds, which the session is dated with."""
        return int(await self._client.script(INDEX_RESERVE, self._keys.tenant(key.tenant), key.session_id))

    def put_soon(self, stored: StoredHead) -> None:
        """`put` of the head as it is within a second: the turns of a second are one entry."""
        self._waiting.add(stored.head.key)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(PUT_AFTER_S)
        self._writing = None
        await self.flush()

    async def flush(self, tenant: str | None = None) -> None:
        """Writes what waits, of one tenant or of all."""
        keys = [key for key in self._waiting if tenant in (None, key.tenant)]
        self._waiting.difference_update(keys)
        for start in range(0, len(keys), HEADS_AT_ONCE):
            for stored in await self._read_heads(keys[start : start + HEADS_AT_ONCE]):
                await self.put(stored)

    async def _read_heads(self, keys: Sequence[SessionKey]) -> list[StoredHead]:
        """Of those that are still there: somebody may have deleted a session since."""
        reads = [("HGETALL", self._keys.session(key).head) for key in keys]
        try:
            answers = await self._client.call(lambda attempt: attempt.together(*reads))
            heads = [decode_head(answer, key) for answer, key in zip(answers, keys, strict=True)]
        except NsmError as error:
            logger.warning(BEHIND, error)
            return []
        return [stored for stored in heads if stored is not None]

    async def close(self) -> None:
        """Nothing waits afterwards."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.wait((writing,))
        await self.flush()

    async def put(self, stored: StoredHead) -> None:
        """After a head moved. The head is safe by now: a failure here goes to the log alone."""
        head = stored.head
        values = (to_us(head.created_at), head.version, stored.num_bytes, optional_us(head.expires_at))
        try:
            await self._client.script(INDEX_PUT, self._keys.tenant(head.tenant), head.session_id, *values)
        except NsmError as error:
            logger.warning(BEHIND, error)

    async def forget(self, head: SessionHead) -> None:
        """After a session was deleted. On failure the next listing does it."""
        self._waiting.discard(head.key)
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
        await self.flush(tenant)
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
        await self.flush(tenant)
        num_sessions, num_bytes = await self._client.script(INDEX_USAGE, self._keys.tenant(tenant))
        return TenantUsage(num_sessions=num_sessions, num_bytes=num_bytes)
