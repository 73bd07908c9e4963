"""Finds batches without an owner, takes them and runs them beside a gateway's other work."""

from __future__ import annotations

import logging

from service.batches.batch import Batch
from service.batches.library import BatchLibrary
from service.batches.pace import LinePace
from service.batches.run import BatchRun
from service.deps import Services
from service.work.runner import WorkRunner

MAX_RUNS = 4  # batches that one process runs at a time


class BatchRunner(WorkRunner[Batch]):
    """Of one application."""

    def __init__(self, services: Services) -> None:
        self._batches = BatchLibrary(services.records)
        super().__init__(
            self._batches,
            news=services.batch_news,
            term_s=services.settings.lease_s,
            max_runs=MAX_RUNS,
            is_limit_shared=False,
            logger=logging.getLogger("nsm.batches"),
        )
        self._services = services
        self._pace = LinePace(services.backend)

    def _make_run(self, work: Batch) -> BatchRun:
        return BatchRun(
            services=self._services,
            library=self._batches,
            pace=self._pace,
            work=work,
            owner=self._owner.name,
            beat_s=self._owner.beat_s,
        )
