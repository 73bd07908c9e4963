"""`nsm serve` processes that start in a moment: one process has imported all that a server needs, and forks for each.

Run as a module it is that process, which ends with the socket that its argument names.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 2**17  # an environment as JSON


class ForkedProcess:
    """A server, as one of `asyncio.subprocess`. `stderr` is read to its end, or the process may wait for its reader."""

    def __init__(self, forks: Forks, pid: int, pidfd: int, stderr: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._forks = forks
        self._pidfd = pidfd

    def send_signal(self, sig: signal.Signals) -> None:
        """Raises ProcessLookupError for a process that has ended."""
        signal.pidfd_send_signal(self._pidfd, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Its exit status, or the signal that ended it, below 0."""
        if self.returncode is None:
            await _is_readable(self._pidfd)
            self.returncode = await asyncio.to_thread(self._forks.status, self.pid)
        return self.returncode


class Forks:
    """The process that forks. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # else numpy begins a thread when it is imported
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[other.fileno()])

    def start(self, environment: Mapping[str, str], stderr: int) -> tuple[int, int]:
        """A server with this environment: its process id, and a descriptor of the process."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(dict(environment)).encode()], [stderr])
            answer, (pidfd,), _, _ = socket.recv_fds(self._socket, 64, 1)
        return int(answer), pidfd

    def status(self, pid: int) -> int:
        """Of a process that has ended; once."""
        with self._lock:
            self._socket.send(json.dumps(pid).encode())
            return int(self._socket.recv(64))

    def close(self) -> None:
        """Servers that are left go on."""
        self._socket.close()
        self._process.wait()


@functools.cache
def forks() -> Forks:
    """That of this process."""
    started = Forks()
    atexit.register(started.close)
    return started


@contextlib.asynccontextmanager
async def forked(environment: Mapping[str, str]) -> AsyncIterator[ForkedProcess]:
    """A server whose settings are in the environment; it is killed if it is still there at the end."""
    output, written = os.pipe()
    stderr = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(output, "rb", buffering=0)
    )
    try:
        pid, pidfd = await asyncio.to_thread(lambda: forks().start(environment, written))
    finally:
        os.close(written)
    process = ForkedProcess(forks(), pid, pidfd, stderr)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        transport.close()
        os.close(pidfd)


async def _is_readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    own = os.dup(descriptor)  # a loop knows one reader of each
    loop.add_reader(own, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(own)
        os.close(own)


def main() -> None:
    """Returns in each child, as a server that has ended, and in the process itself when its socket is closed."""
    from service.server import run
    from service.settings import load_settings
    from service.telemetry.logs import configure_logging
    from tests.support.slow_steps import slow_all

    asked = socket.socket(fileno=int(sys.argv[1]))
    import_server()
    stderr = wait_for_requests(asked)
    asked.close()
    if stderr is not None:
        os.dup2(stderr, 2)
        os.close(stderr)
        slow_all()
        settings = load_settings()
        configure_logging(settings.log_level, settings.log_format)
        run(settings)


def import_server() -> None:
    """As a start does it, and what it imports later. Nothing has begun a thread: no child would have it."""
    from nsm_core.heap import pause_collection
    from nsm_core.torch_import import import_torch, modules_by_name
    from service.web.fastapi_import import importing_fastapi

    pause_collection()
    with importing_fastapi():
        importlib.import_module("service.app")
    with modules_by_name():
        import_torch()
        for name in ("nsm_core.execution.devices", "service.backends.local"):
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()


def wait_for_requests(asked: socket.socket) -> int | None:
    """In a child the descriptor of its log, with its environment in place; None when nobody asks any more."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([asked.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        reap(statuses)
        if asked.fileno() not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(asked, MAX_REQUEST_BYTES, 1)
        if not message:
            return None
        request = json.loads(message)
        if isinstance(request, int):
            asked.send(str(statuses.pop(request)).encode())
        elif pid := os.fork():
            os.close(descriptors[0])
            send_process(asked, pid)
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wakes)
            os.environ.clear()
            os.environ.update(request)
            return descriptors[0]


def send_process(asked: socket.socket, pid: int) -> None:
    """The id and a descriptor of a child that was not waited for yet."""
    pidfd = os.pidfd_open(pid)
    socket.send_fds(asked, [str(pid).encode()], [pidfd])
    os.close(pidfd)


def reap(statuses: dict[int, int]) -> None:
    """Children that have ended, with how."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            statuses[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
