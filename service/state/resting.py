"""Sessions that nobody uses give up what their logs can make again.

After an hour a session keeps its newest snapshot alone: people take a turn back at once or hardly ever. A cold session
keeps none: its next turn reads the whole log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from nsm_core.errors import NsmError
from service.lifecycle.background import running
from service.state.keeper import StateKeeper
from service.stores.sessions.base import SessionStore, Shedding

logger = logging.getLogger("nsm.snapshots")

OLDER_S = 3600.0  # after the last turn, until the older snapshots go
INTERVAL_S = 600.0  # between two looks: Redis is asked for the names of all keys
AT_ONCE = 1000  # sessions


@contextlib.asynccontextmanager
async def shedding_snapshots(
    store: SessionStore, keeper: StateKeeper, *, cold_after_s: float | None, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """While inside, sessions that rest lose snapshots. `cold_after_s`: after the last turn, until the newest goes too;
    None: never.
    """
    async with running(_shed_at_intervals(store, keeper, cold_after_s, interval_s)):
        yield


async def _shed_at_intervals(
    store: SessionStore, keeper: StateKeeper, cold_after_s: float | None, interval_s: float
) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            num_shed = await shed_once(store, keeper, cold_after_s=cold_after_s)
        except NsmError as error:
            logger.warning("snapshots of sessions that nobody uses were not deleted: %s", error)
        else:
            logger.debug("%d sessions that nobody uses lost snapshots", num_shed)


async def shed_once(
    store: SessionStore, keeper: StateKeeper, *, cold_after_s: float | None, older_s: float = OLDER_S
) -> int:
    """The number of sessions that lost some. The newest snapshot goes only where the running model makes the same state
    of the log: never where each turn stores its state.
    """
    num_shed = await store.shed_snapshots(Shedding(unused_for_s=older_s, limit=AT_ONCE))
    keeper.shed(num_shed, "older")
    if cold_after_s is not None and not keeper.is_always:
        cold = Shedding(unused_for_s=cold_after_s, limit=AT_ONCE, of_model=keeper.model_class)
        num_cold = await store.shed_snapshots(cold)
        keeper.shed(num_cold, "all")
        num_shed += num_cold
    return num_shed
