"""Several processes of one host whose metrics are one: prometheus_client's multiprocess mode.

The library turns it on by itself when PROMETHEUS_MULTIPROC_DIR names a folder, which must be empty before the first
process starts. Every number then lives in files there, and whichever process is scraped answers for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from service.lifecycle.background import running

REFRESH_S = 1.0  # maximum age of the other processes' numbers in a scrape
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_LIVE_FILE = re.compile(r"gauge_(?:live\w+)_(\d+)\.db")


def is_shared() -> bool:
    """Whether the library keeps numbers where other processes see them."""
    return values.ValueClass is not values.MutexValue


@contextlib.contextmanager
def sharing_in(folder: Path) -> Iterator[None]:
    """While inside, numbers of metrics made here live in `folder`, which is empty, as do those of child processes."""
    before = values.ValueClass
    os.environ[VARIABLE] = str(folder)
    values.ValueClass = shared = values.MultiProcessValue()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        shared.close_all_files()
        values.ValueClass = before
        del os.environ[VARIABLE]


def render(registry: CollectorRegistry, refresh: Callable[[], None]) -> bytes:
    """The exposition text of `registry`, which refreshes itself, or of all processes that share their numbers."""
    if not is_shared():
        return generate_latest(registry)
    refresh()
    collected = CollectorRegistry()
    collector = MultiProcessCollector(collected)  # type: ignore[no-untyped-call]
    _forget_the_dead(Path(collector._path))
    return generate_latest(collected)


@contextlib.asynccontextmanager
async def sharing(refresh: Callable[[], None]) -> AsyncIterator[None]:
    """While inside, other processes see this one's numbers; afterwards only its counters remain."""
    if not is_shared():
        yield
        return
    try:
        async with running(_refresh_often(refresh)):
            yield
    finally:
        refresh()
        mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]


async def _refresh_often(refresh: Callable[[], None]) -> None:
    while True:
        refresh()
        await asyncio.sleep(REFRESH_S)


def _forget_the_dead(folder: Path) -> None:
    """Gauges of processes that were killed."""
    pids = {int(found[1]) for found in map(_LIVE_FILE.fullmatch, os.listdir(folder)) if found is not None}
    for pid in pids:
        if not psutil.pid_exists(pid):
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
