"""Servers in processes of their own: `nsm serve` and `llama-server`, with as many threads for their models."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.build_llama import LlamaBuild
from nsm_core.errors import NsmError
from nsm_core.execution.names import ExecutorName
from nsm_lab.bench.builds import RUN
from nsm_lab.bench.http_client import Endpoint
from nsm_lab.bench.machine import ProcessUse

START_S, STOP_S = 120.0, 30.0
POLL_S = 0.05
HOST = "127.0.0.1"

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # HTTP_PROXY is for other machines


class Server:
    """One that answers. `log`: what it prints."""

    def __init__(self, command: Sequence[str], *, port: int, log: Path) -> None:
        """Raises NsmError when it does not come up."""
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.endpoint = Endpoint(f"http://{HOST}:{port}")
        try:
            self._wait(f"http://{HOST}:{port}/health")
        except BaseException:
            self.stop()
            raise
        self.use = ProcessUse(self._process.pid)

    def _wait(self, url: str) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError), DIRECT.open(url, timeout=5):
                return
            time.sleep(POLL_S)
        raise NsmError(f"{self._process.args!r} did not start: {self._log.read_text('utf-8', 'replace')[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def nsm_server(
    directory: Path, model: Path, *, slots: int, threads: int = 1, executor: ExecutorName = "auto"
) -> Iterator[Server]:
    """Our gateway with an engine; its sessions lie under `directory`."""
    port, own = free_port(), f"nsm-{executor}"
    command = [sys.executable, "-c", RUN, "serve", "--host", HOST, "--port", str(port), "--num-threads", str(threads)]
    command += ["--max-slots", str(slots), "--data-dir", str(directory / own), "--executor", executor]
    command += ["--model", str(model), "--speculation", "off"]  # llama-server drafts nothing either
    server = Server(command, port=port, log=directory / f"{own}.log")
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def llama_server(
    build: LlamaBuild, name: str, directory: Path, *, slots: int, context: int, threads: int = 1
) -> Iterator[Server]:
    """`context`: tokens that each of its `slots` holds; its slots' files lie in `directory`."""
    port = free_port()
    command = [str(build.program("llama-server")), "-m", str(build.model(name)), "--host", HOST, "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(slots * context)]
    command += ["--slot-save-path", str(directory)]
    server = Server(command, port=port, log=directory / f"llama-server-{name}.log")
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        port: int = listening.getsockname()[1]
        return port
