"""Removes what expired, now and then, for as long as the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from nsm_core.errors import NsmError
from service.sessions.base import SessionStore

logger = logging.getLogger("nsm.sweeping")

INTERVAL_S = 60.0


@contextlib.asynccontextmanager
async def sweeping(store: SessionStore, *, interval_s: float = INTERVAL_S) -> AsyncIterator[None]:
    """While inside, expired sessions are deleted once in `interval_s` seconds."""
    task = asyncio.create_task(_sweep(store, interval_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sweep(store: SessionStore, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            num_removed = await store.remove_expired()
        except NsmError as error:
            logger.warning("expired sessions were not removed: %s", error)
        else:
            logger.debug("%d expired sessions were removed", num_removed)
