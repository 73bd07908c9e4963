"""Trainings side by side on one device, each in a process. A failed launch leaves a process in which nothing runs any
more: another takes its place, and the training is tried once more."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from nsm_lab.evaluation.recall_size.grid import SizeRun, Train

_ATTEMPTS = 2
_LONGEST_WAIT_S = 3600.0

Done = Callable[[SizeRun, dict[str, Any]], None]


class _Worker:
    """A process that trains what it is given, one run after the other."""

    def __init__(self, train: Train, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(theirs, train, device), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends the connection

    def give(self, run: SizeRun) -> None:
        self.connection.send(run)

    def take(self) -> dict[str, Any] | str:
        """The outcome, or what went wrong."""
        try:
            outcome: dict[str, Any] | str = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            outcome = f"the process ended with exit status {self._process.exitcode}"
        return outcome

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def run_all(
    runs: Sequence[SizeRun], train: Train, *, device: str, workers: int, deadline: float, done: Done
) -> list[SizeRun]:
    """Calls `done` for each training that ends; returns those that failed twice.

    `deadline`, of `time.monotonic`: what runs then is stopped and lost, the rest is not begun.
    """
    todo = deque((run, 1) for run in runs)
    idle, busy, failed = list[_Worker](), dict[object, tuple[_Worker, SizeRun, int]](), list[SizeRun]()
    try:
        while (todo or busy) and (left := deadline - time.monotonic()) > 0:
            while todo and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(train, device)
                run, attempt = todo.popleft()
                worker.give(run)
                busy[worker.connection] = worker, run, attempt
            connections = [worker.connection for worker, _, _ in busy.values()]
            for connection in wait(connections, timeout=min(left, _LONGEST_WAIT_S)):
                worker, run, attempt = busy.pop(connection)
                outcome = worker.take()
                if isinstance(outcome, dict):
                    idle.append(worker)
                    done(run, outcome)
                    continue
                worker.stop()
                sys.stderr.write(f"{run}, attempt {attempt}: {outcome}\n")
                if attempt < _ATTEMPTS:
                    todo.append((run, attempt + 1))
                else:
                    failed.append(run)
    finally:
        for worker in (*idle, *(worker for worker, _, _ in busy.values())):
            worker.stop()
    return failed


def _work(connection: Connection, train: Train, device: str) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            run = connection.recv()
        except EOFError:  # whoever gave the runs is gone
            return
        try:
            outcome: dict[str, Any] | str = dict(train(run, device))
        except Exception:
            outcome = traceback.format_exc(limit=3)
        connection.send(outcome)
        if isinstance(outcome, str):
            return
