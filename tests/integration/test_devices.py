"""`nsm serve` with an engine on each of several devices, and an engine's process that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from nsm_core.engine.request import Event, Finished
from nsm_core.errors import EngineDead
from service import workers
from service.backends.process.backend import ProcessBackend
from service.settings import Settings
from tests.integration.test_workers import BODY, Stream, is_ready, settings_of
from tests.nsm_core.engine.harness import make_request
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps
from tests.support.triton_servers import eventually

WAIT_S = 120.0


def processes(server: Server) -> dict[str, psutil.Process]:
    """By the last words of their command lines."""
    children = psutil.Process(server.process.pid).children()
    return {" ".join(child.cmdline()[-2:]): child for child in children}


async def metric(server: Server, name: str) -> float:
    lines = (await server.client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_an_engine_that_is_killed_leaves_the_streams_of_the_other_and_is_replaced(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with running({**settings_of(tiny_model_dir), "DEVICE": "cpu,cpu", "WORKERS": 0}, tmp_path / "data") as server:
        before = processes(server)
        assert set(before) == {"engine 1", "engine 2", "worker 1"}
        with slow_steps():
            streams = [Stream(server, max_tokens=300) for _ in range(2)]
            await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
            before["engine 1"].kill()
        assert all(await asyncio.gather(*(stream.task for stream in streams)))
        ends = sorted('"code":"engine_dead"' in stream.text for stream in streams)
        assert ends == [False, True]
        answer = await server.client.post("/v1/completions", json={**BODY, "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4

        async def are_both_up() -> bool:
            return await metric(server, "nsm_engine_up{") == 2

        await eventually(are_both_up, seconds=WAIT_S)
        await is_ready(server)
        assert await metric(server, "nsm_max_slots ") == 32
        assert await metric(server, 'nsm_process_restarts_total{process="engine"}') == 1
        after = processes(server)
        assert after["engine 1"].pid != before["engine 1"].pid
        assert after["engine 2"].pid == before["engine 2"].pid


# A child whose engine waits in its next step while the file exists
HANGING = """
import functools, pathlib, sys, time
from nsm_core.engine.engine import Engine
from service import worker_process
from service.lifecycle import hang_watch
flag, step = pathlib.Path(sys.argv.pop(1)), Engine.step
def wait_and_step(engine):
    while flag.exists():
        time.sleep(0.01)
    return step(engine)
Engine.step = wait_and_step
hang_watch.FRESH_S = 1.5
worker_process.HangWatch = functools.partial(hang_watch.HangWatch, 2.0)
worker_process.main()
"""


@contextlib.asynccontextmanager
async def supervised_engine(
    model_dir: Path, directory: Path
) -> AsyncIterator[tuple[workers.Process, ProcessBackend, list[str]]]:
    """An engine's process under its supervisor, a gateway's backend on it, and what is told of its restarts."""
    path, restarts = directory / "engine.sock", list[str]()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        settings = Settings(model=model_dir, num_threads=1, device="cpu", store="memory")
        engine = workers.Process("engine", settings, restarted=restarts.append, engine_fd=sock.fileno())
        supervising = asyncio.create_task(engine.supervise())
        backend = ProcessBackend(path)
        try:
            await asyncio.wait_for(backend.start(), WAIT_S)
            yield engine, backend, restarts
        finally:
            await backend.stop()
            await engine.stop(within_s=WAIT_S)
            await supervising


async def test_an_engine_that_hangs_in_a_step_is_replaced(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "hang"
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", HANGING, str(flag)))
    async with supervised_engine(tiny_model_dir, tmp_path) as (_, backend, restarts):
        events = backend.submit(make_request("hangs", max_tokens=100_000)).events()
        await anext(events)
        flag.touch()
        await ends_with_its_engine(events)
        flag.unlink()
        await eventually(lambda: answers(backend), seconds=WAIT_S)
        assert set(restarts) == {"engine"}


async def test_an_engine_that_was_stopped_is_replaced(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENT_S", 3.0)
    async with supervised_engine(tiny_model_dir, tmp_path) as (engine, backend, restarts):
        await asyncio.wait_for(engine.is_ready.wait(), WAIT_S)
        events = backend.submit(make_request("stops", max_tokens=100_000)).events()
        await anext(events)
        assert engine.pid is not None
        stopped = psutil.Process(engine.pid)
        stopped.suspend()
        await ends_with_its_engine(events)
        await eventually(lambda: answers(backend), seconds=WAIT_S)
        assert engine.pid != stopped.pid
        assert set(restarts) == {"engine"}


async def test_a_worker_that_was_stopped_is_replaced(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENT_S", 5.0)
    restarts = list[str]()
    async with supervised_engine(tiny_model_dir, tmp_path) as (engine, _, _):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            settings = Settings(model=tiny_model_dir, num_threads=1, device="cpu", store="memory")
            path = str(tmp_path / "engine.sock")
            worker = workers.Process(
                "worker 1",
                settings,
                restarted=restarts.append,
                http_fd=sock.fileno(),
                engines=[("cpu", path)],
                number=0,
            )
            supervising = asyncio.create_task(worker.supervise())
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                await asyncio.wait_for(worker.is_ready.wait(), WAIT_S)
                assert (await client.get("/health/live")).status_code == 200
                assert worker.pid is not None
                stopped = psutil.Process(worker.pid)
                stopped.suspend()
                with pytest.raises(httpx.TransportError):  # the connection that it has goes with it
                    await client.get("/health/live")
                answer = await client.post("/v1/completions", json={**BODY, "max_tokens": 4})
                assert answer.json()["usage"]["completion_tokens"] == 4
                assert worker.pid != stopped.pid
                assert set(restarts) == {"worker"}
                assert engine.is_ready.is_set()
            await worker.stop(within_s=WAIT_S)
            await supervising


async def ends_with_its_engine(events: AsyncIterator[Event]) -> None:
    async with asyncio.timeout(WAIT_S):
        end = [event async for event in events][-1]
    assert isinstance(end, Finished)
    assert isinstance(end.error, EngineDead)


async def answers(backend: ProcessBackend) -> bool:
    with contextlib.suppress(EngineDead):
        events = [event async for event in backend.submit(make_request("next", max_tokens=2)).events()]
        return isinstance(events[-1], Finished) and events[-1].error is None
    return False
