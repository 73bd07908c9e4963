"""Finds fine-tuning jobs that nobody runs, takes them and runs them, beside everything else that a gateway does.

Of all open jobs of a store the first `NSM_FINE_TUNING_JOBS` run, each in one gateway; the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from nsm_core.errors import NotFound, NsmError
from service.deps import Services
from service.lifecycle.ownership import Owner, OwnershipLost
from service.owned_directory import owned_directory
from service.settings import Settings
from service.tuning.job import Job
from service.tuning.library import JobLibrary
from service.tuning.running import JobRun

logger = logging.getLogger("nsm.tuning")

POLL_S = 1.0  # between two looks for jobs


@contextlib.contextmanager
def job_directory(settings: Settings) -> Iterator[Path]:
    """Beside the store's file, so that checkpoints outlast the process; without one a temporary directory."""
    database = settings.database_path()
    if database is not None:
        yield database.parent / "fine-tuning"
        return
    with owned_directory() as directory:
        yield directory


class JobRunner:
    """Of one application. `directory`: of the files of running jobs, each in one of its own."""

    def __init__(self, services: Services, directory: Path) -> None:
        self._services = services
        self._library = JobLibrary(services.records)
        self._directory = directory
        self._owner = Owner(services.settings.lease_s)
        self._runs: dict[str, tuple[JobRun, asyncio.Task[None]]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs jobs inside. At the end those that run here are left to whoever comes next."""
        task = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            tasks = [task, *(one for _, one in self._runs.values())]
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)

    async def _loop(self) -> None:
        news = self._services.tuning_news
        while True:
            news.clear()
            try:
                await self._find_jobs()
            except NsmError as error:
                logger.warning("fine-tuning jobs are looked for again: %s", error)
            except Exception:
                logger.exception("fine-tuning jobs are looked for again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_S)
            for run, _ in list(self._runs.values()):
                run.wake()

    async def _find_jobs(self) -> None:
        num_allowed = self._services.settings.fine_tuning_jobs
        for tenant, job_id in (await self._library.list_open())[:num_allowed]:
            if job_id in self._runs:
                continue
            with contextlib.suppress(NotFound):
                job = await self._library.get(tenant, job_id)
                if self._owner.is_free(job):
                    await self._own(job)

    async def _own(self, job: Job) -> None:
        before = job.ownership
        owned = await self._library.change(job.tenant, job.id, lambda current: self._owner.taken(current, before))
        self._owner.forget(job)
        if self._owner.owns(owned):
            run = JobRun(
                services=self._services,
                library=self._library,
                job=owned,
                owner=self._owner.name,
                beat_s=min(POLL_S, self._owner.beat_s),
                directory=self._directory / job.id,
            )
            self._runs[job.id] = (run, asyncio.create_task(self._run(run)))

    async def _run(self, run: JobRun) -> None:
        job = run.job
        try:
            await run.run()
        except OwnershipLost:
            logger.warning("fine-tuning job %s: another process goes on with it", job.id)
        except NsmError as error:
            logger.warning("fine-tuning job %s stops, and is tried again: %s", job.id, error)
            await asyncio.sleep(POLL_S)
        except Exception:
            logger.exception("fine-tuning job %s stops, and is tried again", job.id)
            await asyncio.sleep(POLL_S)
        finally:
            self._runs.pop(job.id, None)
            await self._let_go(job)
            self._services.tuning_news.set()

    async def _let_go(self, job: Job) -> None:
        """So that the next process need not wait."""
        with contextlib.suppress(NsmError):
            await self._library.change(job.tenant, job.id, self._owner.freed)
