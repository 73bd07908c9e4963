"""The end of a run: nobody is cut off who could still be answered, in this process or in Locust's workers.

Locust's own --stop-timeout ends users, not what a trace has begun, and a master does not wait for its workers' samples.
"""

from __future__ import annotations

import time
from typing import Any

from gevent import sleep
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.run_state import RunState

REPORTED = "is_drained"  # key in a worker's reports; they come every 3 s
EXTRA_S = 6.0  # for two of these reports


class Drain:
    """Delays the stop of a master or a single process until all is over, or the profile's `drain_s` are.

    A load that is stopped before its time is not waited for.
    """

    def __init__(self, environment: Environment, run: RunState, num_workers: int) -> None:
        self._run = run
        self._num_workers = num_workers
        self._drained: dict[str, bool] = {}
        if isinstance(environment.runner, WorkerRunner):
            environment.events.report_to_master.add_listener(self._report)
        elif isinstance(environment.runner, MasterRunner):
            environment.events.worker_report.add_listener(self._receive)
            environment.events.test_stopping.add_listener(lambda **_: self._wait(self._all_are_drained, EXTRA_S))
        else:
            environment.events.test_stopping.add_listener(lambda **_: self._wait(lambda: run.is_drained, 0.0))

    def _wait(self, is_drained: Any, extra_s: float) -> None:
        if not self._run.is_over:
            return
        deadline = time.monotonic() + self._run.profile.drain_s + extra_s
        while not is_drained() and time.monotonic() < deadline:
            sleep(0.05)

    def _all_are_drained(self) -> bool:
        return len(self._drained) >= self._num_workers and all(self._drained.values())

    def _report(self, data: dict[str, Any], **_: object) -> None:
        data[REPORTED] = self._run.is_drained

    def _receive(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        self._drained[client_id] = bool(data.get(REPORTED))
