"""Compiles kernels before they are launched, several at a time: in one process the compiler makes one after the other.

A rehearsal tells which: the same launches, of which none happens whose kernel this process has not compiled. Other
processes compile those that the compiler's cache on disk does not have, and leave them there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import driver

from nsm_core.control_group import usable_threads
from nsm_core.execution.cuda.start_note import StartNote

logger = logging.getLogger("nsm.execution")

COMMAND = (sys.executable, "-m", "nsm_core.execution.cuda.compiling_process")
MAX_PROCESSES = 12  # each has 0.4 GB


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with types and constants of its arguments. `data`: as the compiler writes them, JSON."""

    module: str
    name: str
    data: str

    def compile(self) -> Any:
        """For the current device of the compiler's driver, or from the cache on disk: the compiler's kernel."""
        return getattr(importlib.import_module(self.module), self.name).preload(self.data)


def compile_ahead(
    launch: Callable[[], None], *, note: StartNote | None = None, num_processes: int | None = None
) -> int:
    """The kernels of `launch` are in the compiler's cache when this returns. How many were not there before.

    `note`: spares the next start of its subject the rehearsal. `num_processes`: at most; None: by the processors. What
    other processes cannot compile is compiled at its first launch, as it would be without them.
    """
    if note is not None and note.exists:
        return 0
    num_missing = _compile_missing(launch, num_processes)
    if note is not None:
        note.write()
    return num_missing


def _compile_missing(launch: Callable[[], None], num_processes: int | None) -> int:
    """How many were missing."""
    missing = _uncached(variants_of(launch))
    most = num_processes or min(MAX_PROCESSES, usable_threads(len(os.sched_getaffinity(0))))
    if len(missing) > 1 and most > 1:
        _compile_in_processes(missing, min(len(missing), most))
    return len(missing)


def variants_of(launch: Callable[[], None]) -> list[Variant]:
    """What this process would have to compile for `launch`, in the order of its launches. Those do not happen."""
    found: dict[tuple[str, str, str], Variant] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        known = (fn.module, fn.name, key)
        if known not in found:
            found[known] = Variant(fn.module, fn.name, compile["specialization_data"])
        return True  # neither compile nor launch it

    with _set(knobs.runtime, "jit_cache_hook", note):
        launch()
    return list(found.values())


def _uncached(variants: Sequence[Variant]) -> list[Variant]:
    """From the first on that the cache on disk does not have. That one is compiled here; those before are loaded."""
    hits: list[bool] = []

    def note(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    with _set(knobs.compilation, "listener", note):
        for index, variant in enumerate(variants):
            variant.compile()
            if hits and not hits[-1]:
                return list(variants[index:])
    return []


def _compile_in_processes(variants: Sequence[Variant], num_processes: int) -> None:
    waiting: queue.SimpleQueue[Variant] = queue.SimpleQueue()
    for variant in variants:
        waiting.put(variant)
    target = json.dumps(dataclasses.asdict(driver.active.get_current_target()))
    with ThreadPoolExecutor(num_processes, "compiling") as threads:
        ends = [threads.submit(_feed_process, target, waiting) for _ in range(num_processes)]
    failures = [str(error) for end in ends if (error := end.exception()) is not None]
    if failures:
        logger.warning("some kernels are compiled at their first launch: %s", failures[0])


def _feed_process(target: str, waiting: queue.SimpleQueue[Variant]) -> None:
    """Has one process compile, until nothing waits. Raises OSError or RuntimeError."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        process.stdin.write(target + "\n")
        while True:
            try:
                variant = waiting.get_nowait()
            except queue.Empty:
                return  # the end of its input ends the process
            process.stdin.write(json.dumps(dataclasses.asdict(variant)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if answer != "\n":
                raise RuntimeError(f"{variant.name}: {answer.strip() or 'the process ended'}")


@contextmanager
def _set(where: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)
