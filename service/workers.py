"""`nsm serve` with workers: a process for the engine of each device, others that answer HTTP, and this one, which
supervises them.

All workers accept connections from one listening socket and reach each engine over a Unix socket. All sockets are
this process's, so a process that dies loses nothing but its own work, and another takes its place. A process that
fails several times before it was ever ready ends the server: it would never serve. All are started at once: a worker
waits for the engine's first message, and needs a second until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from nsm_core.control_group import num_killed
from nsm_core.errors import ConfigError, StartFailed
from nsm_core.stage_times import StageTimes, process_age_s
from service.lifecycle.lifecycle import EXIT_INTERRUPTED, INTERRUPTED, WORKER_END_S
from service.lifecycle.pulse import SILENT_S, falls_silent
from service.lifecycle.start_report import StartReport, read_report
from service.owned_directory import owned_directory
from service.settings import Settings
from service.telemetry.metrics.shared import sharing_in
from service.telemetry.metrics.supervisor import SupervisorMetrics

logger = logging.getLogger("nsm.workers")

COMMAND = (sys.executable, "-m", "service.worker_process")  # of a child, before its role
MAX_FAILED_STARTS = 3  # in a row, of a process that was never ready
RESTART_MIN_S, RESTART_MAX_S = 0.2, 5.0  # between the end of a process and the next in its place
STEADY_S = 30.0  # a process that ran for so long is started again at once
ENGINE_STOP_S = 10.0
BACKLOG = 64  # gateways that connect while the engine starts
LOG = "the log, on standard error, has more"
GOOD_ORDER = b"stop\n"  # the last line for a child: without it the end of its input means that this process was killed
STOPPED = (0, -signal.SIGTERM)  # statuses of a child that somebody asked to stop, after its start and within it


class End(NamedTuple):
    """Of a child. `words`: after its name in a sentence."""

    words: str
    was_asked: bool = False


class Process:
    """A child in one place, started again when it dies. Its standard input stays open for as long as this process
    lives: at its end the child ends too.
    """

    def __init__(
        self,
        role: str,
        settings: Settings,
        *,
        restarted: Callable[[str], None] = lambda kind: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **fields: int | str | list[tuple[str, str]],
    ) -> None:
        """`role`: the words of its command line, `engine` or `worker 1`. `restarted`: called with the first of them
        for each child after one that was ready. `pause`: waits so many seconds. `fields`: what the child needs beside
        the settings; those named `…_fd` are descriptors that it inherits.
        """
        self.role = role
        self.is_ready = asyncio.Event()  # once, for good: the process can work on this machine
        self._fds = tuple(value for name, value in fields.items() if name.endswith("_fd") and isinstance(value, int))
        self._given = {"settings": settings.model_dump(mode="json", include=settings.model_fields_set), **fields}
        self._restarted, self._pause = restarted, pause
        self._stopping = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    async def supervise(self) -> None:
        """Runs the child, and another after each that died, until `stop`.

        Before a child was ever ready: raises ConfigError when another start cannot help, StartFailed after
        MAX_FAILED_STARTS.
        """
        pause_s, num_ended = RESTART_MIN_S, 0
        while not self._stopping.is_set():
            if self.is_ready.is_set():
                self._restarted(self.role.split()[0])
            began, killed_before = asyncio.get_running_loop().time(), num_killed()
            end, was_asked = await self._run()
            if self._stopping.is_set():
                return
            if num_killed() > killed_before:
                end += ", killed for want of memory"
            num_ended += 1
            if not self.is_ready.is_set() and num_ended == MAX_FAILED_STARTS:
                raise StartFailed(
                    f"the {self.role} process failed {num_ended} times in a row and was never ready: it {end}; {LOG}"
                )
            is_steady = asyncio.get_running_loop().time() - began >= STEADY_S
            pause_s = RESTART_MIN_S if is_steady else min(2 * pause_s, RESTART_MAX_S)
            level = logging.INFO if was_asked else logging.ERROR
            logger.log(level, "the %s process %s; it is started again in %g s", self.role, end, pause_s)
            await self._pause(pause_s)

    async def _run(self) -> End:
        """One child, to its end. Raises ConfigError."""
        try:
            child, reports_fd, pulse_fd = await self._start()
        except OSError as error:  # no memory or no room for another process
            return End(f"could not be started ({error})")
        watching = asyncio.create_task(falls_silent(pulse_fd, limit_s=SILENT_S))
        try:
            report = await read_report(reports_fd)
            if report is not None:
                self._take(report)
            ending = asyncio.create_task(child.wait())
            await asyncio.wait((ending, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and watching.result() and not ending.done():
                child.kill()
                await ending
                return End(f"gave no sign of life for {SILENT_S:g} s and was killed")
            status = await ending
        finally:
            watching.cancel()
        if status in STOPPED:
            return End("was asked to stop", was_asked=True)
        reason = "" if report is None or report.failure is None else f" ({report.failure})"
        return End(f"ended with status {status}{reason}")

    def _take(self, report: StartReport) -> None:
        if report.failure is None:
            self.is_ready.set()
        elif report.is_final and not self.is_ready.is_set() and not self._stopping.is_set():
            self.kill()
            raise ConfigError(report.failure)

    async def _start(self) -> tuple[asyncio.subprocess.Process, int, int]:
        """The child, and the descriptors to read its report and its signs of life from. Raises OSError."""
        reports_fd, report_fd = os.pipe()
        beats_fd, pulse_fd = os.pipe()
        fds = (report_fd, pulse_fd)
        try:
            child = await asyncio.create_subprocess_exec(
                *COMMAND, *self.role.split(), stdin=asyncio.subprocess.PIPE, pass_fds=(*self._fds, *fds)
            )
        except BaseException:
            os.close(reports_fd)
            os.close(beats_fd)
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self._child = child
        if child.stdin is not None:
            given = {**self._given, "report_fd": report_fd, "pulse_fd": pulse_fd, "started_at": time.monotonic()}
            child.stdin.write(json.dumps(given).encode() + b"\n")
        return child, reports_fd, beats_fd

    @property
    def pid(self) -> int | None:
        """Of the child that runs."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    def kill(self) -> None:
        """Ends the child at once; no other takes its place."""
        self._stopping.set()
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def stop(self, *, within_s: float) -> None:
        """SIGTERM, and the end of its input in good order; after `within_s` SIGKILL."""
        self._stopping.set()
        child = self._child
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        if child.stdin is not None:
            child.stdin.write(GOOD_ORDER)
            child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), within_s)
        except TimeoutError:
            logger.error("the %s process did not stop within %g s and is killed", self.role, within_s)
            child.kill()
            await child.wait()


def run_workers(settings: Settings, sock: socket.socket) -> None:
    """Serves on `sock`, which is bound, until SIGTERM or SIGINT. Raises ConfigError or StartFailed if a process cannot
    start, and SystemExit at a second SIGINT.
    """
    with owned_directory() as directory, contextlib.ExitStack() as stack:
        engines = []
        for number, device in enumerate(settings.devices, 1):
            engine_sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            path = directory / f"engine-{number}.sock"
            engine_sock.bind(str(path))
            engine_sock.listen(BACKLOG)
            engines.append((device, path, engine_sock))
        shared = directory / "metrics"
        shared.mkdir()
        with sharing_in(shared):  # the children too: they answer for each other, and for this process
            asyncio.run(_supervise(settings, sock, engines))


async def _supervise(settings: Settings, sock: socket.socket, on: Sequence[tuple[str, Path, socket.socket]]) -> None:
    """`on`: the device of each engine, and its socket."""
    stopped, times = asyncio.Event(), StageTimes(time.monotonic() - process_age_s())
    times.ended("this process")
    restarted = SupervisorMetrics(CollectorRegistry()).restarted
    engines = [
        Process(
            "engine" if len(on) == 1 else f"engine {number}",
            settings.model_copy(update={"device": device}),
            restarted=restarted,
            engine_fd=engine_sock.fileno(),
            num_engines=len(on),
        )
        for number, (device, _, engine_sock) in enumerate(on, 1)
    ]
    workers = [
        Process(
            f"worker {number + 1}",
            settings,
            restarted=restarted,
            http_fd=sock.fileno(),
            engines=[(device, str(path)) for device, path, _ in on],
            number=number,
        )
        for number in range(settings.num_workers)
    ]

    def stop(sig: int) -> None:
        """As one process does: a second Ctrl+C ends everything at once, a second SIGTERM changes nothing."""
        if stopped.is_set() and sig == signal.SIGINT:
            for process in (*engines, *workers):
                process.kill()
            logger.warning(INTERRUPTED)
            sys.exit(EXIT_INTERRUPTED)
        stopped.set()

    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stop, sig)
    async with contextlib.AsyncExitStack() as stack:
        stop_s = settings.grace_s + WORKER_END_S
        tasks = [await stack.enter_async_context(_supervised(engine, stop_s=ENGINE_STOP_S)) for engine in engines]
        tasks += [await stack.enter_async_context(_supervised(worker, stop_s=stop_s)) for worker in workers]
        if not await _all_ready(engines, stopped, tasks):
            for process in (*engines, *workers):
                process.kill()  # it holds nothing yet, and reads no input while it starts
            return
        times.ended(_counted(engines, "engine"))
        if await _all_ready(workers, stopped, tasks):
            times.ended(_counted(workers, "worker"))
            logger.info("ready after %.1f s: %s", times.seconds, times)
        await _wait_for(stopped, tasks=tasks)
        logger.info("stopping: running requests may finish within %g s", settings.grace_s)
        await asyncio.gather(*(worker.stop(within_s=settings.grace_s + WORKER_END_S) for worker in workers))
    logger.info("stopped")


async def _all_ready(processes: Sequence[Process], stopped: asyncio.Event, tasks: list[asyncio.Task[None]]) -> bool:
    """False if the server is to stop before they are."""
    for process in processes:
        await _wait_for(stopped, process.is_ready, tasks=tasks)
    return all(process.is_ready.is_set() for process in processes)


def _counted(processes: Sequence[Process], word: str) -> str:
    return f"{len(processes)} {word if len(processes) == 1 else f'{word}s'}"


@contextlib.asynccontextmanager
async def _supervised(process: Process, *, stop_s: float) -> AsyncIterator[asyncio.Task[None]]:
    """Gives the task, which ends with the error of a process that cannot start."""
    task = asyncio.create_task(process.supervise())
    try:
        yield task
    finally:
        await process.stop(within_s=stop_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # whoever waited for it has raised its error


async def _wait_for(*events: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Until one of the events. Raises the error that ended one of the tasks meanwhile."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait((*waits, *tasks), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for task in tasks:
        if task.done():
            task.result()
