from __future__ import annotations

import asyncio
import logging

import pytest

from service.stores.sessions.sqlite import SqliteSessionStore
from service.tuning.job import Job
from service.tuning.library import JobLibrary
from service.work.run import WorkRun
from service.work.runner import WorkRunner
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway, until


class IdleRunner(WorkRunner[Job]):
    """Of a store without works."""

    def _make_run(self, work: Job) -> WorkRun[Job]:
        raise AssertionError("there is no work")


@pytest.mark.parametrize("num_turns", range(5))
async def test_runner_ends_however_close_to_its_news(num_turns: int) -> None:
    """A work that ends is news; the runner may be told to end in any turn of the loop after it."""
    async with gateway(FakeBackend(), store=SqliteSessionStore(None)) as server:
        news = asyncio.Event()
        runner = IdleRunner(
            JobLibrary(server.services.records),
            news=news,
            term_s=10.0,
            max_runs=1,
            is_limit_shared=True,
            logger=logging.getLogger("nsm.tuning"),
        )
        async with asyncio.timeout(60), runner.running():
            await until(lambda: bool(news._waiters))  # it has looked for works
            news.set()
            for _ in range(num_turns):
                await asyncio.sleep(0)
