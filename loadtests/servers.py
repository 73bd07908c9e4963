"""Servers for a run: replicas of `nsm serve` on loopback, with one store."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from loadtests.errors import RunError
from loadtests.run_profile import Service

START_S = 60.0
STOP_S = 40.0
LISTENING = re.compile(r"serving \S+ on (http://\S+) with")


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A process that serves."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def serving(
    service: Service, directory: Path, *, store: str | None = None, model: Path | None = None
) -> Iterator[list[Server]]:
    """`store`: of all replicas, by default a SQLite file in `directory`; `model`: None for the bundled one.

    Raises RunError when a server does not start. They are stopped by SIGTERM, as in production.
    """
    options = {
        "store": store,
        "model": None if model is None else str(model),
        "data-dir": str(directory),
        "max-slots": str(service.max_slots),
        "queue-limit": str(service.queue_limit),
        "num-threads": str(service.num_threads),
    }
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_process(flags, directory / f"server-{n}.log")) for n in range(service.replicas)]
        yield [Server(_wait_for_url(process, log), process, log) for process, log in started]


@contextlib.contextmanager
def _process(flags: list[str], path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    command = [str(Path(sys.executable).with_name("nsm")), "serve", "--port=0", *flags]
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process, path
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Polls its log: the port is the system's choice."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_text("utf-8", errors="replace")
        found = LISTENING.search(text)
        if found:
            return found.group(1)
        if process.poll() is not None:
            raise RunError(f"the server ended with {process.returncode} before it served:\n{text}")
        time.sleep(0.05)
    raise RunError(f"the server did not start within {START_S:g} s:\n{text}")
