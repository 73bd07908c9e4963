"""`nsm serve` with workers: one process for the engine, several that answer HTTP, and this one, which supervises them.

All workers accept connections from one listening socket and reach the engine over one Unix socket. Both sockets are
this process's, so a process that dies loses nothing but its own work, and another takes its place.
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
from collections.abc import AsyncIterator
from pathlib import Path

from nsm_core.control_group import num_killed
from nsm_core.errors import ConfigError
from nsm_core.wire import local as wire
from service.lifecycle.lifecycle import EXIT_INTERRUPTED
from service.owned_directory import owned_directory
from service.settings import Settings

logger = logging.getLogger("nsm.workers")

RESTART_MIN_S, RESTART_MAX_S = 0.2, 5.0  # between the end of a process and the next in its place
STEADY_S = 30.0  # a process that ran for so long is started again at once
ENGINE_STOP_S = 10.0
FINAL_FRAMES_S = 5.0  # beyond the grace time, for a worker's last frames
BACKLOG = 64  # gateways that connect while the engine starts


class Process:
    """A child in one place, started again when it dies. Its standard input stays open for as long as this process
    lives: at its end the child ends too.
    """

    def __init__(self, role: str, settings: Settings, **fields: int | str) -> None:
        """`role`: the words of its command line, `engine` or `worker 1`. `fields`: what the child needs beside the
        settings; those named `…_fd` are descriptors that it inherits.
        """
        self.role = role
        self._fds = tuple(value for name, value in fields.items() if name.endswith("_fd") and isinstance(value, int))
        given = settings.model_dump(mode="json", include=settings.model_fields_set)
        self._line = json.dumps({"settings": given, **fields}).encode() + b"\n"
        self._is_stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self.has_started = asyncio.Event()

    async def supervise(self) -> None:
        """Runs the child, and another after each that died, until `stop`."""
        pause_s = RESTART_MIN_S
        while True:
            started, killed_before = asyncio.get_running_loop().time(), num_killed()
            status = await self._run()
            if self._is_stopping:
                return
            reason = ", killed for want of memory," if num_killed() > killed_before else ""
            logger.error("the %s process ended with status %d%s and is started again", self.role, status, reason)
            is_steady = asyncio.get_running_loop().time() - started >= STEADY_S
            pause_s = RESTART_MIN_S if is_steady else min(2 * pause_s, RESTART_MAX_S)
            await asyncio.sleep(pause_s)

    async def _run(self) -> int:
        command = [sys.executable, "-m", "service.worker_process", *self.role.split()]
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, pass_fds=self._fds)
        self._child = child
        if child.stdin is not None:
            child.stdin.write(self._line)
        self.has_started.set()
        return await child.wait()

    @property
    def pid(self) -> int | None:
        """Of the child that runs."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    def kill(self) -> None:
        """Ends the child at once; no other takes its place."""
        self._is_stopping = True
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def stop(self, *, within_s: float) -> None:
        """SIGTERM, and the end of its input; after `within_s` SIGKILL."""
        self._is_stopping = True
        child = self._child
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        if child.stdin is not None:
            child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), within_s)
        except TimeoutError:
            logger.error("the %s process did not stop within %g s and is killed", self.role, within_s)
            child.kill()
            await child.wait()


def run_workers(settings: Settings, sock: socket.socket) -> None:
    """Serves on `sock`, which is bound, until SIGTERM or SIGINT. Raises ConfigError if the engine cannot start, and
    SystemExit at a second SIGINT.
    """
    with owned_directory() as directory, socket.socket(socket.AF_UNIX) as engine_sock:
        path = directory / "engine.sock"
        engine_sock.bind(str(path))
        engine_sock.listen(BACKLOG)
        shared = directory / "metrics"
        shared.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)  # the children's: they answer for each other
        asyncio.run(_supervise(settings, sock, engine_sock, path))


async def _supervise(settings: Settings, sock: socket.socket, engine_sock: socket.socket, path: Path) -> None:
    stopped = asyncio.Event()
    engine = Process("engine", settings, engine_fd=engine_sock.fileno())
    workers = [
        Process(f"worker {number + 1}", settings, http_fd=sock.fileno(), engine_path=str(path), number=number)
        for number in range(settings.workers)
    ]

    def stop(sig: int) -> None:
        """As one process does: a second Ctrl+C ends everything at once, a second SIGTERM changes nothing."""
        if stopped.is_set() and sig == signal.SIGINT:
            for process in (engine, *workers):
                process.kill()
            sys.exit(EXIT_INTERRUPTED)
        stopped.set()

    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stop, sig)
    async with _supervised(engine, stop_s=ENGINE_STOP_S):
        if not await _is_ready(path, stopped):
            engine.kill()  # it holds nothing yet, and reads no input while it loads the model
            return
        async with contextlib.AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(_supervised(worker, stop_s=settings.grace_s + FINAL_FRAMES_S))
            logger.info("%d %s on one engine", len(workers), "worker" if len(workers) == 1 else "workers")
            await stopped.wait()
            logger.info("stopping")
            await asyncio.gather(*(worker.stop(within_s=settings.grace_s + FINAL_FRAMES_S) for worker in workers))
    logger.info("stopped")


@contextlib.asynccontextmanager
async def _supervised(process: Process, *, stop_s: float) -> AsyncIterator[None]:
    task = asyncio.create_task(process.supervise())
    await process.has_started.wait()
    try:
        yield
    finally:
        await process.stop(within_s=stop_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _is_ready(path: Path, stopped: asyncio.Event) -> bool:
    """Waits for the engine's first message; False if the server shall stop meanwhile. Raises ConfigError."""
    asked, end = asyncio.create_task(_first_message(path)), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((asked, end), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            return False
        message = asked.result()
    finally:
        asked.cancel()
        end.cancel()
    if isinstance(message, wire.CannotStart):
        raise ConfigError(message.message)
    return True


async def _first_message(path: Path) -> wire.ToGateway:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return await wire.read_to_gateway(reader)
    except asyncio.IncompleteReadError as error:
        raise ConfigError("the engine's process ended at its start; the lines above say why") from error
    finally:
        writer.close()
