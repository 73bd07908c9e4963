"""Removes expired sessions and documents at intervals, while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from nsm_core.errors import NsmError
from service.lifecycle.background import running

logger = logging.getLogger("nsm.expiry")

INTERVAL_S = 60.0


class HasExpiry(Protocol):
    """A store of sessions or of records."""

    async def remove_expired(self) -> int: ...


@contextlib.asynccontextmanager
async def removing_expired(store: HasExpiry, *, interval_s: float = INTERVAL_S) -> AsyncIterator[None]:
    """While inside, expired entries are deleted once in `interval_s` seconds."""
    async with running(_remove_at_intervals(store, interval_s)):
        yield


async def _remove_at_intervals(store: HasExpiry, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            num_removed = await store.remove_expired()
        except NsmError as error:
            logger.warning("expired entries were not removed: %s", error)
        else:
            logger.debug("%d expired sessions or records were removed", num_removed)
