"""Older snapshots in the Redis store: the reading side."""

from __future__ import annotations

from typing import Any

from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.sessions.records import not_found, sound
from service.stores.sessions.redis_records import StoredHead, decode_head
from service.stores.sessions.retention import KeptSnapshot


class RedisKept:
    """What the head says is kept, and where."""

    def __init__(self, client: RedisClient, keys: Keyspace) -> None:
        self._client = client
        self._keys = keys

    async def list_kept(self, *, tenant: str, session_id: str) -> tuple[KeptSnapshot, ...]:
        head = await self._client.call(lambda attempt: self._read_head(attempt, tenant, session_id))
        return tuple(slot.snapshot for slot in head.kept)

    async def load_kept(self, *, tenant: str, session_id: str, version: int) -> bytes | None:
        """Between the two reads a slot may be given to another snapshot: its header, which readers check, tells."""
        keys = self._keys.session(tenant, session_id).kept

        async def work(attempt: Attempt) -> Any:
            head = await self._read_head(attempt, tenant, session_id)
            slots = [slot.slot for slot in head.kept if slot.snapshot.version == version]
            return await attempt.command("GET", keys[slots[0] - 1]) if slots else None

        return sound(await self._client.call(work))

    async def _read_head(self, attempt: Attempt, tenant: str, session_id: str) -> StoredHead:
        answer = await attempt.command("HGETALL", self._keys.session(tenant, session_id).head)
        head = decode_head(answer, tenant=tenant, session_id=session_id)
        if head is None:
            raise not_found(session_id)
        return head
