"""Documents in Redis, under the session store's prefix, through its connections: each is one hash with its own tag."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from nsm_core.errors import NsmError, SnapshotCorrupt
from service.stores.records.base import Kind, OwnedRecord, Record
from service.stores.records.conflict import conflict
from service.stores.records.redis_sizes import DocumentSizes
from service.stores.redis.client import Attempt
from service.stores.redis.scripts import load_script
from service.stores.sessions.codec import decoding
from service.stores.sessions.redis import RedisSessionStore

FIELDS = ("owner", "version", "document")
PUT = load_script("put", package="service.stores.records")
COUNT = load_script("count", package="service.stores.records")
ScriptCall = tuple[Any, ...]  # script, key and arguments


class RedisRecordStore:
    """The shared RecordStore."""

    def __init__(self, sessions: RedisSessionStore) -> None:
        self._client = sessions.client
        self._keys = sessions.keys
        self._sizes = DocumentSizes(sessions.client, sessions.keys)

    async def get(self, *, tenant: str, kind: Kind, record_id: str) -> Record | None:
        return (await self.get_many(tenant=tenant, kind=kind, record_ids=(record_id,)))[0]

    async def get_many(self, *, tenant: str, kind: Kind, record_ids: Sequence[str]) -> tuple[Record | None, ...]:
        if not record_ids:
            return ()
        reads = [("HMGET", self._keys.record(tenant, kind, name), *FIELDS) for name in record_ids]
        answers = await self._client.call(lambda attempt: attempt.together(*reads))
        return tuple(
            _decode(answer, _owner(tenant, kind, name), name) for name, answer in zip(record_ids, answers, strict=True)
        )

    async def put(
        self,
        *,
        tenant: str,
        kind: Kind,
        record_id: str,
        document: Mapping[str, Any],
        expected_version: int,
        ttl_s: float | None = None,
        holds: Collection[str] = (),
    ) -> int:
        version = expected_version + 1
        ttl_ms = "" if ttl_s is None else str(max(1, math.ceil(ttl_s * 1000)))
        raw = json.dumps(document)
        values = (secrets.token_hex(12), expected_version, version, raw, ttl_ms)
        key = self._keys.record(tenant, kind, record_id)
        put = (PUT, key, _owner(tenant, kind, record_id), *values)
        try:
            *_, is_put = await self._together(*(self._counting(tenant, name, 1) for name in holds), put)
            if not is_put:
                raise conflict(kind, record_id, expected_version)
        except NsmError:  # the holds are not part of one transaction with the document
            if holds:
                await self.let_go(tenant=tenant, session_ids=holds)
            raise
        await self._sizes.put(tenant, key, version=version, num_bytes=len(raw))
        return version

    async def let_go(self, *, tenant: str, session_ids: Collection[str]) -> tuple[str, ...]:
        if not session_ids:
            return ()
        counts = await self._together(*(self._counting(tenant, name, -1) for name in session_ids))
        return tuple(name for name, count in zip(session_ids, counts, strict=True) if count == 0)

    def _counting(self, tenant: str, session_id: str, change: int) -> ScriptCall:
        owner = _owner(tenant, "chain", session_id)
        return COUNT, self._keys.record(tenant, "chain", session_id), owner, secrets.token_hex(12), change

    async def _together(self, *calls: ScriptCall) -> list[Any]:
        """The answers of scripts that recognise a repeated call, in one round trip to each server."""

        async def work(attempt: Attempt) -> list[Any]:
            try:
                return await attempt.together(*(("EVALSHA", script.sha, 1, *args) for script, *args in calls))
            except NoScriptError:
                return await attempt.together(*(("EVAL", script.text, 1, *args) for script, *args in calls))

        return await self._client.call(work)

    async def delete(self, *, tenant: str, kind: Kind, record_id: str) -> bool:
        key = self._keys.record(tenant, kind, record_id)

        async def work(attempt: Attempt) -> bool:
            # Not found at a later attempt: the first one deleted it, and its answer was lost.
            return await attempt.command("DEL", key) > 0 or attempt.number > 1

        was_there = await self._client.call(work)
        await self._sizes.forget(tenant, key)
        return was_there

    async def usage(self, *, tenant: str) -> int:
        return await self._sizes.total(tenant)

    async def scan(self, *, tenant: str | None = None) -> AsyncIterator[OwnedRecord]:
        """Goes through the names of all keys."""

        async def names(attempt: Attempt) -> set[bytes]:
            return {key async for key in attempt.scan(self._keys.any_record(tenant))}

        for key in await self._client.call(names):
            owner, _, document = await self._client.command("HMGET", key, *FIELDS)
            if owner is not None and document is not None:
                with decoding("a stored document"):
                    found, kind, record_id = json.loads(owner)
                    owned = OwnedRecord(tenant=found, kind=kind, record_id=record_id, document=json.loads(document))
                yield owned

    async def remove_expired(self) -> int:
        """Nothing to do: Redis drops a document itself when its time has come."""
        return 0


def _owner(tenant: str, kind: str, record_id: str) -> str:
    return json.dumps((tenant, kind, record_id))


def _decode(answer: Sequence[bytes | None], owner: str, record_id: str) -> Record | None:
    """Raises SnapshotCorrupt when the key holds something else."""
    found, version, document = answer
    if found is None or version is None or document is None:
        return None
    if found.decode() != owner:
        raise SnapshotCorrupt(f"the document stored for {record_id!r} is another one; it is not used")
    with decoding(f"the document {record_id!r}"):
        return Record(record_id=record_id, version=int(version), document=json.loads(document))
