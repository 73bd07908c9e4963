"""Stored bytes of each tenant and free room of the store, measured while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from nsm_core.errors import NsmError
from service.lifecycle.background import running
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
    """While inside, the metrics have what each of `tenants` has stored and the store's room, every `interval_s`."""
    async with running(_measure(store, metrics, tenants, interval_s)):
        yield


async def _measure(
    store: SessionStore, metrics: SessionMetrics, tenants: Callable[[], Iterable[str]], interval_s: float
) -> None:
    while True:
        try:
            await _measure_tenants(store, metrics, tenants())
            await _measure_room(store, metrics)
        except NsmError as error:
            logger.warning("the store's use was not measured: %s", error)
        await asyncio.sleep(interval_s)


async def _measure_tenants(store: SessionStore, metrics: SessionMetrics, tenants: Iterable[str]) -> None:
    usage = {tenant: await store.usage(tenant=tenant) for tenant in tenants}
    metrics.tenants_stored({tenant: (use.num_sessions, use.num_bytes) for tenant, use in usage.items()})


async def _measure_room(store: SessionStore, metrics: SessionMetrics) -> None:
    room = await store.room()
    if room is not None:
        metrics.room_measured(room.kind, num_free=room.num_free, num_bytes=room.num_bytes)
