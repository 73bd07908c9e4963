"""Prefixes in this process: nothing survives it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from service.stores.prefixes.base import PrefixBounds, PrefixKey, PrefixUsage


@dataclasses.dataclass(slots=True)
class _Held:
    entry: bytes
    used_at: float


class MemoryPrefixStore:
    """A PrefixStore for one process."""

    def __init__(self, bounds: PrefixBounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._tenants: dict[str, OrderedDict[PrefixKey, _Held]] = {}  # of each tenant, least recently used first
        self._num_bytes: Counter[str] = Counter()

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        self._tenants.clear()
        self._num_bytes.clear()

    async def find(self, *, tenant: str, family: str) -> tuple[PrefixKey, ...]:
        oldest = self._clock() - self._bounds.ttl_s
        held = self._tenants.get(tenant, OrderedDict[PrefixKey, _Held]())
        return tuple(key for key, item in held.items() if key.family == family and item.used_at > oldest)

    async def load(self, *, tenant: str, key: PrefixKey) -> bytes | None:
        held, now = self._tenants.get(tenant, OrderedDict()), self._clock()
        item = held.get(key)
        if item is None or item.used_at <= now - self._bounds.ttl_s:
            return None
        item.used_at = now
        held.move_to_end(key)
        return item.entry

    async def put(self, *, tenant: str, key: PrefixKey, entry: bytes) -> None:
        bounds = self._bounds
        if len(entry) > bounds.max_bytes:
            return
        self._drop(tenant, (key,))
        self._tenants.setdefault(tenant, OrderedDict())[key] = _Held(entry, self._clock())
        self._num_bytes[tenant] += len(entry)
        while self._num_bytes.total() > bounds.max_bytes:
            self._drop_oldest(max(self._num_bytes, key=lambda name: (self._num_bytes[name], name)))

    async def remove(self, *, tenant: str, key: PrefixKey) -> None:
        self._drop(tenant, (key,))

    async def usage(self, *, tenant: str) -> PrefixUsage:
        return PrefixUsage(num_entries=len(self._tenants.get(tenant, ())), num_bytes=self._num_bytes[tenant])

    async def remove_expired(self) -> int:
        oldest, num_removed = self._clock() - self._bounds.ttl_s, 0
        for tenant, held in list(self._tenants.items()):
            expired = [key for key, item in held.items() if item.used_at <= oldest]
            self._drop(tenant, expired)
            num_removed += len(expired)
        return num_removed

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, (next(iter(self._tenants[tenant])),))

    def _drop(self, tenant: str, keys: Iterable[PrefixKey]) -> None:
        held = self._tenants.get(tenant, OrderedDict())
        for key in keys:
            item = held.pop(key, None)
            if item is not None:
                self._num_bytes[tenant] -= len(item.entry)
        if not held:
            self._tenants.pop(tenant, None)
            del self._num_bytes[tenant]
