"""Engines and trainings of server processes that take their time while a test says so.

A test that acts in the middle of a turn would lose a race on a machine that has run the whole turn by then.
Run as a module it is a child of a server, whose module its first argument names, that can be slowed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "SLOW_STEPS"  # the file that is there while engines are slow; it has the number of steps before
PAUSE_S = 0.05  # a turn of 300 tokens takes 15 s
REPORT_PAUSE_S = 1.0  # of a training, which reports every few steps
WORKER, TRAINING = "service.worker_process", "service.tuning.process"


def name_file() -> None:
    """In a process of tests, for the servers that it starts."""
    file = Path(tempfile.gettempdir()) / f"nsm-slow-steps-{os.getpid()}"
    file.unlink(missing_ok=True)  # of a run that was killed
    os.environ[VARIABLE] = str(file)


@contextlib.contextmanager
def slow_steps(*, after: int = 0) -> Iterator[None]:
    """Each engine in a process of its own makes so many steps as fast as it can, then one each PAUSE_S."""
    file = Path(os.environ[VARIABLE])
    written = file.with_suffix(".new")
    written.write_text(str(after))
    written.rename(file)
    try:
        yield
    finally:
        file.unlink()


def command(module: str) -> tuple[str, ...]:
    """Of a child that can be slowed, instead of the product's own."""
    return sys.executable, "-m", __name__, module


def slow_all() -> None:
    """In a server's process and in its children, from now on."""
    from service import workers
    from service.tuning import run

    slow_down()
    workers.COMMAND, run.COMMAND = command(WORKER), command(TRAINING)


def slow_down() -> None:
    """In a process that has an engine or will have one, from now on."""
    from nsm_core.engine.engine import Engine, Events

    step, num_steps = Engine.step, 0

    def step_when_due(engine: Engine) -> Events:
        nonlocal num_steps
        after = num_fast_steps()
        if after is None:
            num_steps = 0
        elif engine.has_work:
            num_steps += 1
            if num_steps > after:
                time.sleep(PAUSE_S)
        return step(engine)

    Engine.step = step_when_due  # type: ignore[assignment,method-assign]


def num_fast_steps() -> int | None:
    """None: all steps are fast."""
    try:
        return int(Path(os.environ[VARIABLE]).read_text())
    except FileNotFoundError:
        return None


def slow_worker() -> None:
    """The engine is slowed where it is made: a worker has none, and nothing is imported before its time."""
    from service import local_model

    make = local_model.make_local_backend

    def make_slowed(*args: Any, **options: Any) -> Any:
        slow_down()
        return make(*args, **options)

    local_model.make_local_backend = make_slowed


def slow_training() -> None:
    """Only while a test says so: with the lowest priority it would starve beside other tests."""
    from service.tuning import process

    process.LOWEST_PRIORITY = 0
    say = process._say

    def say_and_wait(**fields: Any) -> None:
        say(**fields)
        after = num_fast_steps()
        if after is not None and fields.get("step", -1) >= after:
            time.sleep(REPORT_PAUSE_S)

    process._say = say_and_wait


def main() -> None:
    module = sys.argv.pop(1)
    slow = {WORKER: slow_worker, TRAINING: slow_training}[module]
    slow()
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
