"""Finds fine-tuning jobs that nobody runs, takes them and runs them, beside everything else that a gateway does.

Of all open jobs of a store that are not paused the first `NSM_FINE_TUNING_JOBS` run, each in one gateway; the others
wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from service.deps import Services
from service.owned_directory import owned_directory
from service.settings import Settings
from service.tuning.job import Job
from service.tuning.library import JobLibrary
from service.tuning.run import JobRun
from service.work.runner import POLL_S, WorkRunner


@contextlib.contextmanager
def job_directory(settings: Settings) -> Iterator[Path]:
    """Beside the store's file, so that checkpoints outlast the process; without one a temporary directory."""
    database = settings.database_path()
    if database is not None:
        yield database.parent / "fine-tuning"
        return
    with owned_directory() as directory:
        yield directory


class JobRunner(WorkRunner[Job]):
    """Of one application. `directory`: of the files of running jobs, each in one of its own."""

    def __init__(self, services: Services, directory: Path) -> None:
        super().__init__(
            JobLibrary(services.records),
            news=services.tuning_news,
            term_s=services.settings.lease_s,
            max_runs=services.settings.fine_tuning_jobs,
            is_limit_shared=True,
            logger=logging.getLogger("nsm.tuning"),
        )
        self._services = services
        self._directory = directory

    def _make_run(self, work: Job) -> JobRun:
        return JobRun(
            services=self._services,
            library=self._library,
            work=work,
            owner=self._owner.name,
            beat_s=min(POLL_S, self._owner.beat_s),
            directory=self._directory / work.id,
        )
