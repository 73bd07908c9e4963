"""Finds long work without an owner, takes it and runs it beside a gateway's other work."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from nsm_core.errors import NotFound, NsmError
from service.work.library import WorkLibrary
from service.work.ownership import Owner, OwnershipLost
from service.work.run import WorkRun
from service.work.work import Work

POLL_S = 1.0  # between two looks for works

WorkT = TypeVar("WorkT", bound=Work)


class WorkRunner(abc.ABC, Generic[WorkT]):
    """Of one application. `news`: set when a work was created or changed here. `max_runs`: at a time, in this process,
    or if `is_limit_shared` in all processes of the store. `term_s`: without a sign of life for so long, a work of
    another process is free again.
    """

    def __init__(
        self,
        library: WorkLibrary[WorkT],
        *,
        news: asyncio.Event,
        term_s: float,
        max_runs: int,
        is_limit_shared: bool,
        logger: logging.Logger,
    ) -> None:
        self._library = library
        self._news = news
        self._owner = Owner(term_s)
        self._max_runs = max_runs
        self._is_limit_shared = is_limit_shared
        self._logger = logger
        self._trouble: type[Exception | None] = type(None)  # of the last search
        self._runs: dict[str, tuple[WorkRun[WorkT], asyncio.Task[None]]] = {}

    @abc.abstractmethod
    def _make_run(self, work: WorkT) -> WorkRun[WorkT]:
        """Of a work that is this process's now."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs works inside. At the end those that run here are left to whoever comes next."""
        task = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            tasks = [task, *(one for _, one in self._runs.values())]
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)

    async def _loop(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._find()
            except Exception as error:
                self._report(error)
            else:
                self._report(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):  # before Python 3.12 `wait_for` may swallow the cancel of its task
                    await self._news.wait()
            for run, _ in list(self._runs.values()):
                run.wake()

    def _report(self, error: Exception | None) -> None:
        """Of the last search for works. Only a change is logged: a store that is down may stay so for long."""
        noun, before, self._trouble = self._library.noun, self._trouble, type(error)
        if self._trouble is before:
            return
        if error is None:
            self._logger.info("the search for any open %s succeeds again", noun)
        elif isinstance(error, NsmError):
            self._logger.warning("the search for any open %s fails, and is repeated: %s", noun, error)
        else:
            self._logger.error("the search for any open %s fails, and is repeated", noun, exc_info=error)

    async def _find(self) -> None:
        num_left = self._max_runs if self._is_limit_shared else self._max_runs - len(self._runs)
        for tenant, work_id in await self._library.list_open():
            if num_left <= 0:
                return
            num_left -= await self._takes_room(tenant, work_id)

    async def _takes_room(self, tenant: str, work_id: str) -> bool:
        """Takes the work if it is free. Whether it leaves less room for others here."""
        if work_id in self._runs:
            return self._is_limit_shared
        try:
            work = await self._library.get(tenant, work_id)
        except NotFound:
            return False
        if work.is_paused:
            return False
        is_taken = self._owner.is_free(work) and await self._own(work)
        return is_taken or self._is_limit_shared

    async def _own(self, work: WorkT) -> bool:
        """Whether it runs here now."""
        before = work.ownership
        owned = await self._library.change(work.tenant, work.id, lambda current: self._owner.taken(current, before))
        self._owner.forget(work)
        if not self._owner.owns(owned):
            return False
        run = self._make_run(owned)
        self._runs[work.id] = (run, asyncio.create_task(self._run(run)))
        return True

    async def _run(self, run: WorkRun[WorkT]) -> None:
        work, noun = run.work, self._library.noun
        try:
            await run.run()
        except OwnershipLost:
            self._logger.warning("%s %s: another process goes on with it", noun, work.id)
        except NsmError as error:
            self._logger.warning("%s %s stops, and is tried again: %s", noun, work.id, error)
            await asyncio.sleep(POLL_S)
        except Exception:
            self._logger.exception("%s %s stops, and is tried again", noun, work.id)
            await asyncio.sleep(POLL_S)
        finally:
            self._runs.pop(work.id, None)
            await self._let_go(work)
            self._news.set()

    async def _let_go(self, work: WorkT) -> None:
        """So that the next process need not wait."""
        with contextlib.suppress(NsmError):
            await self._library.change(work.tenant, work.id, self._owner.freed)
