"""Sessions in Redis that nobody uses lose snapshots."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from service.stores.redis.client import Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import SHED
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis_fields import MICROSECONDS, StoredHead, decode_head, to_us
from service.stores.sessions.retention import Shedding

HEADS_AT_ONCE = 200
FIELDS = ("tenant", "session_id", "updated_us", "retained", "snapshot_bytes", "model_fingerprint", "numerics")


@dataclasses.dataclass(frozen=True, slots=True)
class RedisShedding:
    """`on_change` gets the head of each session that lost snapshots."""

    client: RedisClient
    keys: Keyspace
    on_change: Callable[[StoredHead], None]

    async def shed_snapshots(self, shedding: Shedding) -> int:
        """See SessionStore. It goes through the names of all keys."""
        names = await self.client.call(self._head_names)
        num_shed = 0
        for start in range(0, len(names), HEADS_AT_ONCE):
            for key in await self._idle(names[start : start + HEADS_AT_ONCE], shedding):
                num_shed += await self._shed(key, shedding)
                if num_shed == shedding.limit:
                    return num_shed
        return num_shed

    async def _head_names(self, attempt: Attempt) -> list[bytes]:
        return list({name async for name in attempt.scan(self.keys.any_head)})

    async def _idle(self, names: Sequence[bytes], shedding: Shedding) -> list[SessionKey]:
        """Those of them that seem to be due: the script looks again."""
        reads = [("HMGET", name, *FIELDS) for name in names]
        answers = await self.client.call(lambda attempt: attempt.together(*reads))
        until_us = (time.time() - shedding.unused_for_s) * MICROSECONDS
        found = []
        for answer in answers:
            if any(value is None for value in answer):
                continue  # gone, or damaged: its next use says so
            tenant, session_id, updated_us, retained, snapshot_bytes, *origin = (value.decode() for value in answer)
            has_any = bool(retained) or (shedding.of_model is not None and snapshot_bytes != "0")
            if has_any and int(updated_us) <= until_us and shedding.of_model in (None, tuple(origin)):
                found.append(SessionKey(tenant, session_id))
        return found

    async def _shed(self, key: SessionKey, shedding: Shedding) -> bool:
        keys = self.keys.session(key).all("")
        values = (to_us(shedding.unused_for_s), int(shedding.of_model is not None))

        async def work(attempt: Attempt) -> StoredHead | None:
            status, *answer = await attempt.script(SHED, keys, *values)
            return decode_head(answer[0], key) if status == b"ok" else None

        stored = await self.client.call(work)
        if stored is not None:
            self.on_change(stored)
        return stored is not None
