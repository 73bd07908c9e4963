from __future__ import annotations

import asyncio
import logging

import pytest

from nsm_core.errors import StoreUnavailable
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


class DownLibrary(JobLibrary):
    """Its store is down for the first searches. `num_calls`: so far."""

    num_calls = 0

    async def list_open(self) -> list[tuple[str, str]]:
        self.num_calls += 1
        if self.num_calls <= 3:
            raise StoreUnavailable("Redis is down")
        return []


async def test_store_that_is_down_and_back_is_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsm.tuning")
    async with gateway(FakeBackend(), store=SqliteSessionStore(None)) as server:
        news, library = asyncio.Event(), DownLibrary(server.services.records)
        async with asyncio.timeout(60), make_runner(library, news).running():
            for number in range(1, 6):
                await until(lambda number=number: library.num_calls == number and bool(news._waiters))
                news.set()
    assert [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "nsm.tuning"] == [
        ("WARNING", "the search for any open fine-tuning job fails, and is repeated: Redis is down"),
        ("INFO", "the search for any open fine-tuning job succeeds again"),
    ]


def make_runner(library: JobLibrary, news: asyncio.Event) -> IdleRunner:
    return IdleRunner(
        library,
        news=news,
        term_s=10.0,
        max_runs=1,
        is_limit_shared=True,
        logger=logging.getLogger("nsm.tuning"),
    )


@pytest.mark.parametrize("num_turns", range(5))
async def test_runner_ends_however_close_to_its_news(num_turns: int) -> None:
    """A work that ends is news; the runner may be told to end in any turn of the loop after it."""
    async with gateway(FakeBackend(), store=SqliteSessionStore(None)) as server:
        news = asyncio.Event()
        runner = make_runner(JobLibrary(server.services.records), news)
        async with asyncio.timeout(60), runner.running():
            await until(lambda: bool(news._waiters))  # it has looked for works
            news.set()
            for _ in range(num_turns):
                await asyncio.sleep(0)
