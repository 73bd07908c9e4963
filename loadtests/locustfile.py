"""What Locust loads: `locust -f loadtests/locustfile.py --load-profile short --urls http://127.0.0.1:8000 ...`.

`python -m loadtests` starts servers, writes the scripts, calls this and reports. By hand, also with Locust's pages and
on several machines, the scripts must have been written before: `python -m loadtests --only-scripts`.
"""

from __future__ import annotations

import logging
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.arrivals import share_of
from loadtests.drain import Drain
from loadtests.open_loop import ArrivalLoop
from loadtests.recording import Recorder
from loadtests.run_profile import load_profile
from loadtests.run_state import RunState
from loadtests.scripts import read_scripts
from loadtests.slo import judge, load_slo
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
EXIT_MISSED = 1
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
    profile = load_profile(options.load_profile)
    for name, user in USERS.items():
        user.fixed_count = getattr(profile.users, name)
    WaitingUser.fixed_count = options.processes_in_all if profile.open_loop else 0
    path = Path(options.samples) if options.samples else None
    run = RunState(
        profile=profile,
        scripts=read_scripts(Path(options.scripts)),
        urls=tuple(options.urls.split(",")),
        recorder=Recorder(environment, path),
        rng=random.Random(profile.seed),
    )
    ScriptedUser.run_state = run
    if not isinstance(environment.runner, MasterRunner):
        _listen(environment, run)
    Drain(environment, run, options.processes_in_all)
    environment.events.quitting.add_listener(_judge)


def _listen(environment: Environment, run: RunState) -> None:
    """Start and end of the load in a process that makes some."""
    options = environment.parsed_options
    loops: list[ArrivalLoop] = []

    def start(**_: Any) -> None:
        run.ends_at = time.monotonic() + run.profile.run_s
        loop = run.profile.open_loop
        if loop is not None:
            index = environment.runner.worker_index if isinstance(environment.runner, WorkerRunner) else 0
            arrivals = share_of(arrivals_of(run.profile, loop, options.capacity), index, options.processes_in_all)
            loops.append(ArrivalLoop(run, arrivals, loop))
            loops[-1].start()
            run.loop_is_done = lambda: all(loop.is_done for loop in loops)

    def finish(**_: Any) -> None:
        while loops:
            loops.pop().close()

    environment.events.test_start.add_listener(start)
    environment.events.test_stop.add_listener(finish)


def _judge(environment: Environment, **_: Any) -> None:
    """Errors are for the objectives to judge; without any, the exit code tells only whether Locust itself worked."""
    recorder = ScriptedUser.run_state.recorder
    recorder.close()
    environment.process_exit_code = 2 if environment.runner.exceptions else 0
    if environment.parsed_options.slo and not isinstance(environment.runner, WorkerRunner):
        verdicts = judge(load_slo(environment.parsed_options.slo), recorder.samples)
        for verdict in verdicts:
            logger.log(logging.INFO if verdict.is_met else logging.ERROR, "%s", verdict)
        if not all(verdict.is_met for verdict in verdicts):
            environment.process_exit_code = EXIT_MISSED
