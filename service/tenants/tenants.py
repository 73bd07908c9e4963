"""Who a request is from, and how much its tenant may take."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from nsm_core.errors import InvalidRequest, QuotaExceeded, RateLimited, Unauthenticated
from service.stores.records.base import RecordStore
from service.stores.sessions.base import DEFAULT_TENANT, SessionStore
from service.stores.states.base import StateStore
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.requests import Rejection
from service.tenants.api_keys import KeyFile, TenantLimits
from service.tenants.rate_limit import Allowance, TokenBucket

NO_LIMITS = TenantLimits()
CONCURRENCY_RETRY_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose request it is. `key_id`: None on a server without keys."""

    tenant: str
    key_id: str | None
    may_read_metrics: bool


ANYBODY = Caller(tenant=DEFAULT_TENANT, key_id=None, may_read_metrics=True)


class Permit:
    """Room for requests to the engine. `leave`, or the end of a `with`, gives it back; idempotent."""

    def __init__(self, running: Counter[str], tenant: str, num_requests: int) -> None:
        self._running = running
        self._tenant = tenant
        self._num_requests = num_requests

    def leave(self) -> None:
        self._running[self._tenant] -= self._num_requests
        self._num_requests = 0

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


class Tenants:
    """Lives on the event loop of one application. Without keys there is one tenant, without limits."""

    def __init__(
        self,
        keys: KeyFile | None,
        store: SessionStore,
        metrics: Metrics,
        records: RecordStore | None = None,
        states: StateStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`records`, `states`: whose documents and named states count as stored bytes beside the sessions."""
        self._keys = keys
        self._records, self._states = records, states
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._running: Counter[str] = Counter()
        self._new_sessions: Counter[str] = Counter()  # being created at this moment
        self._new_bytes: Counter[str] = Counter()

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    def names(self) -> tuple[str, ...]:
        """Of all tenants that have a key; of everybody without keys."""
        return (DEFAULT_TENANT,) if self._keys is None else self._keys.tenants()

    def identify(self, key: str | None) -> Caller:
        """Raises Unauthenticated; the message repeats nothing of the key."""
        if self._keys is None:
            return ANYBODY
        entry = None if key is None else self._keys.find(key)
        if entry is None:
            self._metrics.requests.rejected("invalid_api_key")
            problem = "an API key is required" if key is None else "the API key is not valid"
            raise Unauthenticated(f"{problem}; send it as Authorization: Bearer nsm_…")
        return Caller(tenant=entry.tenant, key_id=entry.id, may_read_metrics=entry.metrics)

    def take(self, tenant: str) -> Allowance | None:
        """Counts one HTTP request; None for a tenant without such a limit."""
        limits = self._limits(tenant)
        if limits.requests_per_s is None:
            return None
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = TokenBucket(self._clock)
        burst = limits.burst or max(1, math.ceil(limits.requests_per_s))
        allowance = bucket.take(per_s=limits.requests_per_s, burst=burst)
        if allowance.retry_after_s is not None:
            self._metrics.requests.rejected("rate_limit")
        return allowance

    def enter(self, tenant: str, num_requests: int = 1) -> Permit:
        """Room for so many requests to the engine, all or none.

        Raises RateLimited, or InvalidRequest for more than there could ever be.
        """
        limit = self._limits(tenant).max_concurrent
        running = self._running[tenant]
        if limit is not None and num_requests > limit:
            message = f"n times the number of prompts must be at most {limit} (max_concurrent of this API key's tenant)"
            raise InvalidRequest(f"{message}, got {num_requests}", param="n")
        if limit is not None and running + num_requests > limit:
            self._metrics.requests.rejected("concurrency_limit")
            raise RateLimited(
                f"max_concurrent of this API key's tenant is {limit}: {running} requests are running, "
                f"{num_requests} more would be too many",
                code="concurrency_limit_exceeded",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        self._running[tenant] += num_requests
        return Permit(self._running, tenant, num_requests)

    def at_once(self, tenant: str, most: int) -> int:
        """How many of `most` requests to the engine `enter` would let in, if no other ran."""
        limit = self._limits(tenant).max_concurrent
        return most if limit is None else min(most, limit)

    def may_cache_prefixes(self, tenant: str) -> bool:
        """Whether the operator lets this tenant's stateless requests keep states and start from them."""
        return self._limits(tenant).prefix_cache

    async def check_stored_bytes(self, tenant: str, *, num_own_bytes: int = 0, num_new_bytes: int = 0) -> None:
        """To be asked before a turn, so that no text is made that cannot be kept, and before documents are added.

        A turn that begins below the limit is kept also when it ends above. `num_own_bytes`: of the stored bytes, those
        that wait for the answer. Raises QuotaExceeded.
        """
        limit = self._limits(tenant).max_stored_bytes
        if limit is not None:
            num_stored = (await self._store.usage(tenant=tenant)).num_bytes + await self._document_bytes(tenant)
            self._require_bytes(num_stored - num_own_bytes, num_new_bytes, limit)

    async def _document_bytes(self, tenant: str) -> int:
        num_bytes = 0 if self._records is None else await self._records.usage(tenant=tenant)
        return num_bytes + (0 if self._states is None else await self._states.usage(tenant=tenant))

    @contextlib.asynccontextmanager
    async def new_session(self, tenant: str, *, num_bytes: int = 0) -> AsyncIterator[None]:
        """Around the creation of a session that takes `num_bytes` from the start. Raises QuotaExceeded.

        What this process creates at the same moment counts; of what others create then, a little may come on top.
        """
        limits = self._limits(tenant)
        if limits.max_sessions is None and limits.max_stored_bytes is None:
            yield
            return
        self._new_sessions[tenant] += 1
        self._new_bytes[tenant] += num_bytes
        try:
            usage = await self._store.usage(tenant=tenant)
            if limits.max_sessions is not None:
                self._require_sessions(usage.num_sessions, self._new_sessions[tenant], limits.max_sessions)
            if limits.max_stored_bytes is not None:
                num_stored = usage.num_bytes + await self._document_bytes(tenant)
                self._require_bytes(num_stored, self._new_bytes[tenant], limits.max_stored_bytes)
            yield
        finally:
            self._new_sessions[tenant] -= 1
            self._new_bytes[tenant] -= num_bytes

    def _limits(self, tenant: str) -> TenantLimits:
        found = None if self._keys is None else self._keys.limits(tenant)
        return NO_LIMITS if found is None else found

    def _require_sessions(self, num_sessions: int, num_new: int, limit: int) -> None:
        if num_sessions + num_new > limit:
            self._reject(
                "session_quota",
                f"max_sessions of this API key's tenant is {limit}, and {num_sessions} are stored",
                holding="sessions, or responses and conversations, which have one each",
            )

    def _require_bytes(self, num_bytes: int, num_new: int, limit: int) -> None:
        if num_bytes >= limit or num_bytes + num_new > limit:
            more = f", {num_new} more would be too many" if num_new else ""
            self._reject(
                "byte_quota",
                f"max_stored_bytes of this API key's tenant is {limit}, and {num_bytes} are stored{more}",
                holding="sessions, responses, conversations, states or files",
            )

    def _reject(self, reason: Rejection, message: str, *, holding: str) -> None:
        """`holding`: what takes the room."""
        self._metrics.requests.rejected(reason)
        raise QuotaExceeded(f"{message}; delete {holding}, or ask the operator for more")
