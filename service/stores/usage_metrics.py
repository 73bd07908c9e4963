"""What each tenant has stored, counted now and then for as long as the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from nsm_core.errors import NsmError
from service.stores.sessions.base import SessionStore
from service.telemetry.metrics.sessions import SessionMetrics

logger = logging.getLogger("nsm.metrics")

INTERVAL_S = 30.0


@contextlib.asynccontextmanager
async def measuring_usage(
    store: SessionStore,
    metrics: SessionMetrics,
    tenants: Callable[[], Iterable[str]],
    *,
    interval_s: float = INTERVAL_S,
) -> AsyncIterator[None]:
    """While inside, the metrics tell what each of `tenants` has stored, as it was once in `interval_s` seconds."""
    task = asyncio.create_task(_measure(store, metrics, tenants, interval_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _measure(
    store: SessionStore, metrics: SessionMetrics, tenants: Callable[[], Iterable[str]], interval_s: float
) -> None:
    while True:
        try:
            usage = {tenant: await store.usage(tenant=tenant) for tenant in tenants()}
        except NsmError as error:
            logger.warning("what tenants have stored was not counted: %s", error)
        else:
            metrics.tenants_stored({tenant: (use.num_sessions, use.num_bytes) for tenant, use in usage.items()})
        await asyncio.sleep(interval_s)
