"""Whole `nsm serve` processes on loopback: to be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.control_groups import inside
from tests.support.forked_processes import ForkedProcess, forked

REPOSITORY = Path(__file__).resolve().parents[2]
Process = ForkedProcess | asyncio.subprocess.Process
URL = re.compile(r"serving .* on (http://[^\s,]+)")
# As `nsm serve` does, and without what only other commands import
SERVE = """
from nsm_core.heap import pause_collection
pause_collection()
from service.server import run
from service.settings import load_settings
from service.telemetry.logs import configure_logging
settings = load_settings()
configure_logging(settings.log_level, settings.log_format)
run(settings)
"""


class Server:
    """One process and a client of it. `start`: what it logged until it served; `rest`: until its end."""

    def __init__(self, process: Process, client: httpx.AsyncClient, start: str, rest: asyncio.Task[bytes]) -> None:
        self.process = process
        self.client = client
        self.start = start
        self.rest = rest

    async def create(self, session_id: str) -> None:
        response = await self.client.post("/v1/sessions", json={"id": session_id})
        assert response.status_code == 200, response.text

    async def say(self, session_id: str, text: str, **body: Any) -> dict[str, Any]:
        body = {"input": text, "max_tokens": 24, **body}
        response = await self.client.post(f"/v1/sessions/{session_id}/generate", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def say_once(self, session_id: str, text: str, **body: Any) -> dict[str, Any]:
        await self.create(session_id)
        return await self.say(session_id, text, **body)

    async def head(self, session_id: str) -> tuple[int, int]:
        session = (await self.client.get(f"/v1/sessions/{session_id}")).json()
        return session["version"], session["position"]

    def kill(self) -> None:
        """kill -9 of all its processes: workers before the engine, whose end they would report."""
        for process in reversed(psutil.Process(self.process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with one that was killed before
                process.kill()
        self.process.kill()

    def suspend(self) -> None:
        """SIGSTOP to all its processes."""
        for process in self._processes():
            process.suspend()

    def resume(self) -> None:
        """The inverse of `suspend`."""
        for process in self._processes():
            process.resume()

    def _processes(self) -> list[psutil.Process]:
        this = psutil.Process(self.process.pid)
        return [this, *this.children(recursive=True)]

    async def kill_in_mid_stream(self, session_id: str, text: str, **body: Any) -> None:
        """kill -9 after a few chunks of a turn that would go on for long."""
        body = {"input": text, "max_tokens": 20_000, "stream": True, **body}
        num_chunks = 0
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            async with self.client.stream("POST", f"/v1/sessions/{session_id}/generate", json=body) as stream:
                async for line in stream.aiter_lines():
                    if not line.startswith("data:"):
                        continue  # an empty line after the fifth must not kill again
                    assert '"finish_reason":null' in line
                    num_chunks += 1
                    if num_chunks == 5:
                        self.kill()
        assert await self.process.wait() == -9
        assert num_chunks >= 5


@contextlib.asynccontextmanager
async def running(
    backend_settings: Mapping[str, object], data_dir: Path, *, group: Path | None = None, **changes: object
) -> AsyncIterator[Server]:
    """`backend_settings`: the fixture's. `group`: the control group to run in. `changes`: other settings, named without
    NSM_.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NSM_")}
    settings = {"DATA_DIR": data_dir, "PORT": 0, "GRACE_S": 1, **backend_settings, **changes}
    environment.update({f"NSM_{name}": str(value) for name, value in settings.items()})
    async with forked(environment) if group is None else executed(environment, group) as process:
        try:
            assert process.stderr is not None
            start = await read_start(process.stderr)
            url = url_in(start)
            async with (
                asyncio.TaskGroup() as tasks,
                httpx.AsyncClient(base_url=url, timeout=60.0, verify=False) as client,
            ):
                rest = tasks.create_task(process.stderr.read())  # a full pipe would stop the server
                yield Server(process, client, start, rest)
                stop(process)
        finally:
            stop(process)
            await process.wait()


@contextlib.asynccontextmanager
async def executed(environment: Mapping[str, str], group: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """In a control group, from its first instruction on."""
    command = inside(group, sys.executable, "-c", SERVE)
    yield await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, env=environment, stderr=asyncio.subprocess.PIPE
    )


def stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed by the test
        process.terminate()


async def read_url(log: asyncio.StreamReader) -> str:
    return url_in(await read_start(log))


async def read_start(log: asyncio.StreamReader) -> str:
    """Up to the line with the URL."""
    lines = []
    async for line in log:
        lines.append(line.decode())
        if URL.search(lines[-1]):
            return "".join(lines)
    raise RuntimeError("the server did not start:\n" + "".join(lines))


def url_in(start: str) -> str:
    found = URL.search(start)
    assert found is not None
    return found[1]
