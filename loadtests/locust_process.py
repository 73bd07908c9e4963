"""Locust in processes of its own: one that makes the load, or a master and its workers."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtests.conclusion import SAMPLES
from loadtests.errors import RunError
from loadtests.run_profile import Profile

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILE = ROOT / "loadtests" / "locustfile.py"
START_S = 60.0  # for workers to reach their master
STOP_S = 20.0  # for the last samples of a run that is interrupted


def run_locust(args: argparse.Namespace, profile: Profile, urls: Sequence[str], capacity: float) -> None:
    """Returns when the load is over and its samples are written. Raises RunError when a process of Locust failed.

    Interrupted passes through, after Locust has been stopped and has written its results.
    """
    shared = _shared_options(args, urls, capacity)
    log_path = args.out / "locust.log"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_path.open("wb"))
        processes = [
            stack.enter_context(_process([*command, *shared], log.fileno()))
            for command in _commands(args, profile, args.workers)
        ]
        *workers, writer = processes
        writer.wait()
        for worker in workers:  # they end with their master
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(STOP_S)
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise RunError(f"a process of Locust ended with {failed[0]}; see {log_path}")


def _commands(args: argparse.Namespace, profile: Profile, num_workers: int) -> Iterator[list[str]]:
    """Workers first, then the process that writes the samples."""
    num_users = profile.users.total + (num_workers if profile.open_loop else 0)
    run = ["--headless", "--users", str(num_users), "--spawn-rate", "100"]
    run += ["--stop-timeout", "2"]
    run += ["--samples", str(args.out / SAMPLES), "--only-summary", "--html", str(args.out / "locust.html")]
    if num_workers > 1:
        port = ["--master-port", str(args.master_port)]
        yield from ([*_locust(), "--worker", *port] for _ in range(num_workers))
        run += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(args.master_port)]
        run += ["--expect-workers", str(num_workers), "--expect-workers-max-wait", f"{START_S:.0f}"]
    yield [*_locust(), *run]


def _locust() -> list[str]:
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]


def _shared_options(args: argparse.Namespace, urls: Sequence[str], capacity: float) -> list[str]:
    files = ["--load-profile", str(args.out / "profile.json"), "--scripts", str(args.out / "scripts.json")]
    return [*files, "--urls", ",".join(urls), "--processes-in-all", str(args.workers), "--capacity", str(capacity)]


@contextlib.contextmanager
def _process(command: list[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """Ended by SIGTERM when `with` is left early. In a session of its own: Ctrl-C reaches it through this program."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
