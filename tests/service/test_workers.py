"""The supervisor of a server with workers, with small programs in place of the engine and the workers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from nsm_core.errors import ConfigError, StartFailed
from service import workers
from service.settings import Settings
from service.telemetry.metrics.shared import is_shared, sharing_in
from service.telemetry.metrics.supervisor import SupervisorMetrics
from service.workers import MAX_FAILED_STARTS, RESTART_MAX_S, Process, run_workers

FAILS = """
report('{"failure": "KeyError: it broke"}')
sys.exit(3)
"""
REFUSES = """
report('{"failure": "NSM_MODEL is no model", "is_final": true}')
sys.stdin.read()
"""
SERVES = """
report('{}')
sys.stdin.read()
"""
STARTS = """
sys.stdin.read()
"""
WAITS_FOR = """
import time
while {other!r} not in open(starts).read():
    time.sleep(0.01)
"""
STOPS_THE_SERVER = """
report('{}')
os.kill(os.getppid(), 15)
sys.stdin.read()
"""
ENDS_READY = """
report('{}')
sys.exit(4)
"""
STOPS_ON_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
report('{}')
sys.stdin.read()
"""
RECORDS_INPUT = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report('{}')
with open(starts, "a") as file:
    file.write(sys.stdin.read())
"""
IS_KILLED = """
os.kill(os.getpid(), 9)
"""
Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes children of the supervisor run these lines, by the first word of their role. Gives the file in which each
    of them leaves its role.
    """

    def make(**lines: str) -> Path:
        starts, path = tmp_path / "starts", tmp_path / "program.py"
        begin = f"""
        import json, os, sys
        given = json.loads(sys.stdin.readline())
        starts = {str(starts)!r}
        with open(starts, "a") as file:
            file.write(" ".join(sys.argv[1:]) + "\\n")
        def report(line):
            os.write(given["report_fd"], line.encode() + b"\\n")
        """
        text = textwrap.dedent(begin)
        for role, body in lines.items():
            text += f"if sys.argv[1] == {role!r}:\n" + textwrap.indent(body, "    ")
        path.write_text(text)
        starts.touch()
        monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-I", str(path)))
        monkeypatch.setattr(workers, "RESTART_MIN_S", 0.0)
        return starts

    return make


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def test_worker_that_fails_at_each_start_ends_the_server_and_is_named_with_its_reason(
    program: Program, sock: socket.socket
) -> None:
    starts = program(engine=SERVES, worker=FAILS)
    with pytest.raises(StartFailed) as failed:
        run_workers(Settings(workers=1), sock)
    assert str(failed.value) == (
        "the worker 1 process failed 3 times in a row and was never ready: it ended with status 3 "
        "(KeyError: it broke); the log, on standard error, has more"
    )
    assert sorted(starts.read_text().splitlines()) == ["engine", *["worker 1"] * MAX_FAILED_STARTS]


def test_engine_that_fails_at_each_start_ends_the_server_and_the_workers_that_wait_for_it(
    program: Program, sock: socket.socket
) -> None:
    starts = program(engine=IS_KILLED, worker=STARTS)
    with pytest.raises(StartFailed, match=r"the engine process failed 3 times in a row .* it ended with status -9;"):
        run_workers(Settings(workers=2), sock)
    assert starts.read_text().splitlines().count("engine") == MAX_FAILED_STARTS


def test_workers_start_while_the_engine_does(program: Program, sock: socket.socket) -> None:
    engine, worker = WAITS_FOR.format(other="worker"), WAITS_FOR.format(other="engine")
    starts = program(engine=engine + SERVES, worker=worker + STOPS_THE_SERVER)
    run_workers(Settings(workers=1), sock)
    assert sorted(starts.read_text().splitlines()) == ["engine", "worker 1"]


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_process_that_no_other_start_can_help_ends_the_server_at_once(
    program: Program, sock: socket.socket, role: str
) -> None:
    refuses = REFUSES if role == "engine" else WAITS_FOR.format(other="engine") + REFUSES  # both start at once
    starts = program(**{"engine": SERVES, "worker": SERVES, role: refuses})
    with pytest.raises(ConfigError, match=r"^NSM_MODEL is no model$"):
        run_workers(Settings(workers=1), sock)
    assert starts.read_text().splitlines().count("engine") == 1


async def test_process_that_was_ready_is_started_again_at_growing_distances_and_counted(
    program: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(worker=ENDS_READY)
    monkeypatch.setattr(workers, "RESTART_MIN_S", 0.2)
    pauses: list[float] = []
    restarted: list[str] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            process.kill()

    process = Process("worker 1", Settings(), restarted=restarted.append, pause=pause)
    with caplog.at_level(logging.ERROR, logger="nsm.workers"):
        await process.supervise()
    assert pauses == [0.4, 0.8, 1.6, 3.2, RESTART_MAX_S, RESTART_MAX_S, RESTART_MAX_S]
    assert restarted == ["worker"] * 6
    assert caplog.messages[0] == "the worker 1 process ended with status 4; it is started again in 0.4 s"


@pytest.mark.parametrize("stopped", [STOPS_ON_SIGTERM, SERVES], ids=["its own handler", "the system's"])
async def test_process_that_is_asked_to_stop_is_started_again_without_an_error(
    program: Program, stopped: str, caplog: pytest.LogCaptureFixture
) -> None:
    program(worker=stopped)

    async def pause(seconds: float) -> None:
        process.kill()

    process = Process("worker 1", Settings(), pause=pause)
    with caplog.at_level(logging.INFO, logger="nsm.workers"):
        task = asyncio.create_task(process.supervise())
        await process.is_ready.wait()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        await task
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith("the worker 1 process was asked to stop; it is started again in ")


async def test_process_is_told_that_it_stops_in_good_order(program: Program) -> None:
    """Else the end of its input would say that the supervisor was killed."""
    starts = program(worker=RECORDS_INPUT)
    process = Process("worker 1", Settings())
    task = asyncio.create_task(process.supervise())
    await process.is_ready.wait()
    await process.stop(within_s=60.0)
    await task
    assert starts.read_text() == "worker 1\nstop\n"


async def test_process_that_fails_after_it_was_once_ready_is_not_given_up(program: Program) -> None:
    starts = program(engine=SERVES)
    num_pauses = 0

    async def pause(seconds: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        program(engine=FAILS)
        if num_pauses == MAX_FAILED_STARTS + 2:
            process.kill()

    process = Process("engine", Settings(), pause=pause)
    task = asyncio.create_task(process.supervise())
    await process.is_ready.wait()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await task
    assert starts.read_text().splitlines() == ["engine"] * (MAX_FAILED_STARTS + 2)


async def test_process_that_cannot_be_made_counts_as_failed_start(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program()
    monkeypatch.setattr(workers, "COMMAND", (str(tmp_path / "absent"),))
    with pytest.raises(StartFailed, match=r"could not be started .*absent"):
        await Process("engine", Settings()).supervise()


def test_restarts_are_in_the_scrape_of_the_workers(tmp_path: Path) -> None:
    with sharing_in(tmp_path):
        SupervisorMetrics(CollectorRegistry()).restarted("worker")
        collected = CollectorRegistry()
        MultiProcessCollector(collected, str(tmp_path))  # type: ignore[no-untyped-call]
    name = "nsm_process_restarts_total"
    assert collected.get_sample_value(name, {"process": "worker"}) == 1
    assert collected.get_sample_value(name, {"process": "engine"}) == 0
    assert not is_shared()
