"""Documents in this process's memory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from service.stores.records.base import ABSENT, Kind, OwnedRecord, Record
from service.stores.records.conflict import conflict


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    version: int
    raw: str  # as text, so that nobody changes what is stored by changing what was given or got
    expires_at: float | None


class MemoryRecordStore:
    """A RecordStore that forgets when the process ends. Every method runs without awaiting: it is atomic by itself."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._stored: dict[tuple[str, Kind, str], _Stored] = {}

    async def get(self, *, tenant: str, kind: Kind, record_id: str) -> Record | None:
        stored = self._find((tenant, kind, record_id))
        if stored is None:
            return None
        return Record(record_id=record_id, version=stored.version, document=json.loads(stored.raw))

    async def get_many(self, *, tenant: str, kind: Kind, record_ids: Sequence[str]) -> tuple[Record | None, ...]:
        return tuple([await self.get(tenant=tenant, kind=kind, record_id=record_id) for record_id in record_ids])

    async def put(
        self,
        *,
        tenant: str,
        kind: Kind,
        record_id: str,
        document: Mapping[str, Any],
        expected_version: int,
        ttl_s: float | None = None,
    ) -> int:
        key = (tenant, kind, record_id)
        stored = self._find(key)
        if (ABSENT if stored is None else stored.version) != expected_version:
            raise conflict(kind, record_id, expected_version)
        expires_at = None if ttl_s is None else self._clock() + ttl_s
        self._stored[key] = _Stored(expected_version + 1, json.dumps(document), expires_at)
        return expected_version + 1

    async def delete(self, *, tenant: str, kind: Kind, record_id: str) -> bool:
        key = (tenant, kind, record_id)
        was_there = self._find(key) is not None
        self._stored.pop(key, None)
        return was_there

    async def usage(self, *, tenant: str) -> int:
        return sum(len(stored.raw) for (owner, _, _), stored in self._stored.items() if owner == tenant)

    async def scan(self, *, tenant: str | None = None) -> AsyncIterator[OwnedRecord]:
        for owner, kind, record_id in tuple(self._stored):
            stored = self._find((owner, kind, record_id))
            if stored is not None and tenant in (None, owner):
                document = json.loads(stored.raw)
                yield OwnedRecord(tenant=owner, kind=kind, record_id=record_id, document=document)

    async def remove_expired(self) -> int:
        expired = [key for key in self._stored if self._find(key) is None]
        for key in expired:
            del self._stored[key]
        return len(expired)

    def _find(self, key: tuple[str, Kind, str]) -> _Stored | None:
        stored = self._stored.get(key)
        if stored is None or (stored.expires_at is not None and self._clock() >= stored.expires_at):
            return None
        return stored
