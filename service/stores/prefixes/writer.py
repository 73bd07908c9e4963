"""States on their way to the store of prefixes: written one after another, while nobody waits."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from nsm_core.errors import NsmError
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.stores.prefixes.base import PrefixKey, PrefixStore
from service.stores.prefixes.entry import encode_entry
from service.stores.prefixes.keys import ID_BYTES, PromptDigests
from service.telemetry.metrics.metrics import Metrics

logger = logging.getLogger("nsm.prefixes")

MAX_PENDING = 32  # states of megabytes; more are dropped
MAX_TENANT_PENDING = 8  # so that no tenant's states are dropped because of another's
PAUSE_S = 5.0  # after the store failed, nobody asks it for so long
DRAIN_S = 2.0


class Breaker:
    """Whether the store is asked at all: one that is down must not cost every request a time-out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._clock() < self._open_until

    def failed(self, error: BaseException) -> None:
        if not self.is_open:
            logger.warning("stored prefixes are not used for %g s: %s", PAUSE_S, str(error) or type(error).__name__)
        self._open_until = self._clock() + PAUSE_S


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A state that a lookup may use before it is stored."""

    digests: PromptDigests
    state: bytes


class PrefixWriter:
    """`pending` finds its entries until they are in the store, or lost."""

    def __init__(
        self,
        backend: InferenceBackend,
        store: PrefixStore,
        metrics: Metrics,
        breaker: Breaker,
        *,
        state_format: StateFormat,
    ) -> None:
        self._backend = backend
        self._state_format = state_format
        self._store = store
        self._metrics = metrics
        self._breaker = breaker
        self._pending: dict[str, dict[PrefixKey, Pending]] = {}  # by tenant
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def pending(self, tenant: str) -> dict[PrefixKey, Pending]:
        return self._pending.get(tenant, {})

    def has_room(self, tenant: str) -> bool:
        """Whether another state would be kept."""
        num_all = sum(map(len, self._pending.values()))
        return len(self.pending(tenant)) < MAX_TENANT_PENDING and num_all < MAX_PENDING

    def add(self, tenant: str, ids: tuple[int, ...], state: bytes) -> None:
        """Keep the state after `ids`. Never blocks, never fails; too many at once are dropped."""
        digests = PromptDigests(tenant=tenant, model=self._backend.model, ids=ids)
        key, waiting = digests.key(len(ids)), self._pending.setdefault(tenant, {})
        if key in waiting:
            return
        if not self.has_room(tenant):
            self._metrics.prefixes.saved("dropped")
            return
        waiting[key] = Pending(digests, state)
        self.spawn(self._write(tenant, key))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside the requests; `drain` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def remove(self, tenant: str, key: PrefixKey) -> None:
        """An entry that cannot be used makes room for one that can."""
        try:
            await self._store.remove(tenant=tenant, key=key)
        except NsmError as error:
            self._breaker.failed(error)

    async def drain(self, *, timeout_s: float = DRAIN_S) -> None:
        """Waits for writes under way; drops those that take longer."""
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(tuple(self._tasks), timeout=deadline - time.monotonic())
        late = tuple(self._tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _write(self, tenant: str, key: PrefixKey) -> None:
        pending = self._pending[tenant][key]
        try:
            async with self._one_at_a_time:
                if not self._breaker.is_open:
                    entry = await asyncio.to_thread(self._encode, tenant, key, pending)
                    await self._store.put(tenant=tenant, key=key, entry=entry)
            self._metrics.prefixes.saved("dropped" if self._breaker.is_open else "stored")
        except NsmError as error:
            self._breaker.failed(error)
            self._metrics.prefixes.saved("failed")
        finally:
            del self._pending[tenant][key]
            if not self._pending[tenant]:
                del self._pending[tenant]

    def _encode(self, tenant: str, key: PrefixKey, pending: Pending) -> bytes:
        return encode_entry(
            tenant=tenant,
            key=key,
            raw_ids=pending.digests.raw[: ID_BYTES * key.position],
            state=pending.state,
            model=self._backend.model,
            tokenizer=self._backend.tokenizer,
            created_at=time.time(),
            state_format=self._state_format,
        )
