"""Finds batches that nobody runs, takes them and runs them, beside everything else that a gateway does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator

from nsm_core.errors import NotFound, NsmError
from service.batches.batch import Batch, Ownership
from service.batches.library import BatchLibrary
from service.batches.pace import LinePace
from service.batches.running import BatchRun, OwnershipLost
from service.deps import Services

logger = logging.getLogger("nsm.batches")

POLL_S = 1.0  # between two looks for batches
BEATS_PER_TERM = 3  # two may be late before another process takes the batch
MAX_RUNS = 4  # batches that one process runs at a time


class BatchRunner:
    """Of one application."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._library = BatchLibrary(services.records)
        self._pace = LinePace(services.backend)
        self._owner = uuid.uuid4().hex
        self._term_s = services.settings.lease_s
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, tuple[Ownership, float]] = {}  # of others, and since when

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
                if self._is_free(batch):
                    await self._own(batch)

    def _is_free(self, batch: Batch) -> bool:
        """Nobody runs it, or nobody who has shown a sign of life for a while."""
        if batch.ownership is None:
            return True
        ownership, since = self._seen.get(batch.id, (None, 0.0))
        if ownership != batch.ownership:
            self._seen[batch.id] = (batch.ownership, time.monotonic())
            return False
        return time.monotonic() - since > self._term_s

    async def _own(self, batch: Batch) -> None:
        before = batch.ownership

        def take(current: Batch) -> Batch | None:
            mine = Ownership(owner=self._owner, beat=0)
            return dataclasses.replace(current, ownership=mine) if current.ownership == before else None

        owned = await self._library.change(batch.tenant, batch.id, take)
        self._seen.pop(batch.id, None)
        if owned.ownership is not None and owned.ownership.owner == self._owner:
            task = asyncio.create_task(self._run(owned))
            self._runs[batch.id] = task

    async def _run(self, batch: Batch) -> None:
        run = BatchRun(
            services=self._services,
            library=self._library,
            pace=self._pace,
            batch=batch,
            owner=self._owner,
            beat_s=self._term_s / BEATS_PER_TERM,
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

        def free(current: Batch) -> Batch | None:
            is_mine = current.ownership is not None and current.ownership.owner == self._owner
            return dataclasses.replace(current, ownership=None) if is_mine else None

        with contextlib.suppress(NsmError):
            await self._library.change(batch.tenant, batch.id, free)
