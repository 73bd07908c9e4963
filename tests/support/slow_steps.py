"""Engines of server processes that take their time while a test says so.

A test that acts in the middle of a turn would lose a race on a machine that has run the whole turn by then.
Run as a module it is a child of `service.workers` whose engine can be slowed.
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
WORKER = "service.worker_process"
COMMAND = (sys.executable, "-m", __name__, WORKER)  # instead of service.workers.COMMAND


def name_file() -> None:
    """In a process of tests, for the servers that it starts."""
    os.environ[VARIABLE] = str(Path(tempfile.gettempdir()) / f"nsm-slow-steps-{os.getpid()}")


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


def slow_down() -> None:
    """In a server's process, from now on."""
    from nsm_core.engine.engine import Engine, Events

    file, step, num_steps = Path(os.environ[VARIABLE]), Engine.step, 0

    def step_when_due(engine: Engine) -> Events:
        nonlocal num_steps
        if not file.exists():
            num_steps = 0
        elif engine.has_work:
            num_steps += 1
            with contextlib.suppress(FileNotFoundError):
                if num_steps > int(file.read_text()):
                    time.sleep(PAUSE_S)
        return step(engine)

    Engine.step = step_when_due  # type: ignore[assignment,method-assign]


def main() -> None:
    """The engine is slowed where it is made: a worker has none, and nothing is imported before its time."""
    from service import local_model

    del sys.argv[1]
    make = local_model.make_local_backend

    def make_slowed(*args: Any, **options: Any) -> Any:
        slow_down()
        return make(*args, **options)

    local_model.make_local_backend = make_slowed
    importlib.import_module(WORKER).main()


if __name__ == "__main__":
    main()
