"""What Locust loads: `locust -f loadtests/locustfile.py --load-profile short --urls http://127.0.0.1:8000 ...`.

`python -m loadtests` starts servers, writes the scripts, calls this and reports. By hand, also with Locust's pages and
on several machines, the scripts must have been written before: `python -m loadtests --only-scripts`.
"""

from __future__ import annotations

import collections
import logging
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.arrivals import Arrival, share_of
from loadtests.drain import Drain
from loadtests.errors import EXIT_MISSED, EXIT_NO_RESULT, RunError
from loadtests.open_loop import ArrivalLoop
from loadtests.plain_http import server_url
from loadtests.recording import Recorder
from loadtests.run_end import RunEnd
from loadtests.run_profile import Profile, load_profile
from loadtests.run_state import RunState
from loadtests.samples import Sample
from loadtests.scripts import read_scripts
from loadtests.slo import Slo, judge, load_slo
from loadtests.steps import arrivals_of
from loadtests.users import (  # Locust finds the classes in this module
    USERS,
    ChatUser,
    CompletionUser,
    ForkStormUser,
    LongContextUser,
    ScriptedUser,
    SessionUser,
    SlowReaderUser,
    TroubleUser,
    WaitingUser,
)

__all__ = (
    "ChatUser",
    "CompletionUser",
    "ForkStormUser",
    "LongContextUser",
    "SessionUser",
    "SlowReaderUser",
    "TroubleUser",
    "WaitingUser",
)
logger = logging.getLogger("loadtests")


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("recurrent sessions")
    group.add_argument("--load-profile", default="short", help="a file, or a name in loadtests/profiles")
    group.add_argument("--urls", default="http://127.0.0.1:8000", help="base URLs of the replicas, with commas")
    group.add_argument("--scripts", default="scripts.json", help="conversations and their right answers")
    group.add_argument("--samples", default="", help="file for every single sample, one JSON object a line")
    group.add_argument(
        "--slo", default="", help="a file, or a name in loadtests/objectives: a miss makes the exit code 1"
    )
    group.add_argument("--processes-in-all", type=int, default=1, help="workers that share the open loop's arrivals")
    group.add_argument("--capacity", type=float, default=0.0, help="requests/s, for rates that are multiples of it")


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """The counts of users are the profile's; --users must be their sum, and one for each process of an open loop."""
    options = environment.parsed_options
    try:
        run = _run_state(environment)
        arrivals = _plan(run.profile, options.capacity)
        slo = load_slo(options.slo) if options.slo else None
    except (RunError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(EXIT_NO_RESULT)
    profile = run.profile
    for name, user in USERS.items():
        user.fixed_count = getattr(profile.users, name)
    WaitingUser.fixed_count = options.processes_in_all if profile.open_loop else 0
    ScriptedUser.run_state = run
    environment.events.test_start.add_listener(lambda **_: run.start())
    if not isinstance(environment.runner, MasterRunner):
        _listen(environment, run, arrivals)
    Drain(environment, run, options.processes_in_all)
    if not isinstance(environment.runner, WorkerRunner):
        RunEndWriter(environment, run, arrivals, slo)
        if options.headless:  # Locust's own timer starts before the users do
            environment.events.test_start.add_listener(
                lambda **_: gevent.spawn_later(profile.run_s, environment.runner.quit)
            )


def _run_state(environment: Environment) -> RunState:
    """Raises RunError and ValueError for options that cannot be."""
    options = environment.parsed_options
    profile = load_profile(options.load_profile)
    return RunState(
        profile=profile,
        scripts=read_scripts(Path(options.scripts)),
        urls=tuple(server_url(url) for url in options.urls.split(",")),
        recorder=Recorder(environment, Path(options.samples) if options.samples else None),
        rng=random.Random(profile.seed),
    )


def _plan(profile: Profile, capacity: float) -> list[Arrival]:
    return [] if profile.open_loop is None else arrivals_of(profile, profile.open_loop, capacity)


def _listen(environment: Environment, run: RunState, arrivals: Sequence[Arrival]) -> None:
    """Start and end of the open loop in a process that makes load."""
    loops: list[ArrivalLoop] = []

    def start(**_: Any) -> None:
        loop = run.profile.open_loop
        if loop is not None:
            index = environment.runner.worker_index if isinstance(environment.runner, WorkerRunner) else 0
            share = share_of(arrivals, index, environment.parsed_options.processes_in_all)
            loops.append(ArrivalLoop(run, share, loop))
            loops[-1].start()
            run.loop_is_done = lambda: all(loop.is_done for loop in loops)

    def finish(**_: Any) -> None:
        while loops:
            loops.pop().close()

    environment.events.test_start.add_listener(start)
    environment.events.test_stop.add_listener(finish)


class RunEndWriter:
    """In the process that has all samples: says how far the run came, and decides Locust's exit code."""

    def __init__(self, environment: Environment, run: RunState, arrivals: Sequence[Arrival], slo: Slo | None) -> None:
        self._environment = environment
        self._run = run
        self._planned = dict(collections.Counter(arrival.step for arrival in arrivals))
        self._slo = slo
        self._ran_s = 0.0
        environment.events.test_stopping.add_listener(self._stop_clock)
        environment.events.quitting.add_listener(self._end)

    def _stop_clock(self, **_: Any) -> None:
        self._ran_s = time.monotonic() - self._run.started_at

    def _end(self, **_: Any) -> None:
        """Errors are for the objectives to judge; without any, the exit code says only whether Locust itself worked."""
        self._environment.runner.stop()  # a signal ends the run here first; the last samples come with the stop
        recorder = self._run.recorder
        end = RunEnd(self._run.profile.run_s, self._ran_s, self._planned)
        if recorder.directory is not None:
            end.write(recorder.directory)
        recorder.close()
        self._environment.process_exit_code = EXIT_NO_RESULT if self._environment.runner.exceptions else 0
        if self._slo is not None:
            self._environment.process_exit_code = _judge(self._slo, end, recorder.samples)


def _judge(slo: Slo, end: RunEnd, samples: Sequence[Sample]) -> int:
    verdicts, gaps = judge(slo, samples), end.gaps(samples)
    for verdict in verdicts:
        logger.log(logging.INFO if verdict.is_met else logging.ERROR, "%s", verdict)
    for gap in gaps:
        logger.error("no result: %s", gap)
    if gaps:
        return EXIT_NO_RESULT
    return 0 if all(verdict.is_met for verdict in verdicts) else EXIT_MISSED
