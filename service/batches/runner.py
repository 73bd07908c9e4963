"""Finds batches that nobody runs, takes them and runs them, beside everything else that a gateway does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from nsm_core.errors import NotFound, NsmError
from service.batches.batch import Batch
from service.batches.library import BatchLibrary
from service.batches.pace import LinePace
from service.batches.running import BatchRun
from service.deps import Services
from service.lifecycle.ownership import Owner, OwnershipLost

logger = logging.getLogger("nsm.batches")

POLL_S = 1.0  # between two looks for batches
MAX_RUNS = 4  # batches that one process runs at a time


class BatchRunner:
    """Of one application."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._library = BatchLibrary(services.records)
        self._pace = LinePace(services.backend)
        self._owner = Owner(services.settings.lease_s)
        self._runs: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs batches inside. At the end those that run here are left to whoever comes next."""
        task = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            tasks = [task, *self._runs.values()]
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)

    async def _loop(self) -> None:
        news = self._services.batch_news
        while True:
            news.clear()
            try:
                await self._find_batches()
            except NsmError as error:
                logger.warning("batches are looked for again: %s", error)
            except Exception:
                logger.exception("batches are looked for again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_S)

    async def _find_batches(self) -> None:
        for tenant, batch_id in await self._library.list_open():
            if len(self._runs) >= MAX_RUNS:
                return
            if batch_id in self._runs:
                continue
            with contextlib.suppress(NotFound):
                batch = await self._library.get(tenant, batch_id)
                if self._owner.is_free(batch):
                    await self._own(batch)

    async def _own(self, batch: Batch) -> None:
        before = batch.ownership
        owned = await self._library.change(batch.tenant, batch.id, lambda current: self._owner.taken(current, before))
        self._owner.forget(batch)
        if self._owner.owns(owned):
            task = asyncio.create_task(self._run(owned))
            self._runs[batch.id] = task

    async def _run(self, batch: Batch) -> None:
        run = BatchRun(
            services=self._services,
            library=self._library,
            pace=self._pace,
            batch=batch,
            owner=self._owner.name,
            beat_s=self._owner.beat_s,
        )
        try:
            await run.run()
        except OwnershipLost:
            logger.warning("batch %s: another process goes on with it", batch.id)
        except NsmError as error:
            logger.warning("batch %s stops, and is tried again: %s", batch.id, error)
            await asyncio.sleep(POLL_S)
        except Exception:
            logger.exception("batch %s stops, and is tried again", batch.id)
            await asyncio.sleep(POLL_S)
        finally:
            self._runs.pop(batch.id, None)
            await self._let_go(batch)

    async def _let_go(self, batch: Batch) -> None:
        """So that the next process need not wait."""
        with contextlib.suppress(NsmError):
            await self._library.change(batch.tenant, batch.id, self._owner.freed)
