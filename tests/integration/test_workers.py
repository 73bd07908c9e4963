"""`nsm serve --workers N`: an engine's process and processes that answer HTTP, killed and stopped as they run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.support.gateway import frames_of
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps
from tests.support.triton_servers import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 120.0
BODY = {"prompt": "Once", "seed": 1, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """For tests that kill none of its processes: the counts of a killed one are gone."""
    async with running(settings_of(tiny_model_dir), tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victim(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """For tests that kill its processes, after which all run again."""
    async with running(settings_of(tiny_model_dir), tmp_path_factory.mktemp("victim")) as started:
        yield started


def settings_of(model_dir: Path) -> dict[str, object]:
    return {"MODEL": model_dir, "NUM_THREADS": 1, "DEVICE": "cpu", "WORKERS": 2}


def children(server: Server) -> list[psutil.Process]:
    """The engine's process, then the workers by their numbers."""
    found = psutil.Process(server.process.pid).children()
    return sorted(found, key=lambda child: (child.cmdline()[-1] != "engine", child.cmdline()[-1]))


def holder_of(server: Server, port: int) -> psutil.Process:
    """The worker that has accepted the connection from this port of a client."""
    for child in children(server)[1:]:
        if any(conn.raddr and conn.raddr.port == port for conn in child.net_connections("tcp")):
            return child
    raise AssertionError(f"no worker has a connection from port {port}")


async def has_all(server: Server) -> bool:
    return len(psutil.Process(server.process.pid).children()) == 3


async def is_ready(server: Server) -> None:
    """Waits until a worker answers and has its engine."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                async with httpx.AsyncClient(base_url=server.client.base_url) as client:
                    if (await client.get("/health/ready")).status_code == 200:
                        return
            except httpx.TransportError:
                pass  # a connection that a killed process had accepted
            await asyncio.sleep(0.1)


class Stream:
    """A stream on a connection of its own."""

    def __init__(self, server: Server, *, max_tokens: int) -> None:
        self.client = httpx.AsyncClient(base_url=server.client.base_url, timeout=WAIT_S)
        self.text = ""
        self.has_begun = asyncio.Event()
        self.port = 0
        self.task = asyncio.create_task(self._read(max_tokens))

    async def _read(self, max_tokens: int) -> bool:
        """Whether the stream came to its own end."""
        body = {**BODY, "max_tokens": max_tokens, "stream": True}
        try:
            async with self.client, self.client.stream("POST", "/v1/completions", json=body) as answer:
                self.port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                async for piece in answer.aiter_text():
                    self.text += piece
                    self.has_begun.set()
        except httpx.RemoteProtocolError:
            return False
        return self.text.endswith("data: [DONE]\n\n")


async def streams_on_both(server: Server, *, max_tokens: int) -> dict[int, list[Stream]]:
    """Streams by the process that serves them, at least one of each worker."""
    found: dict[int, list[Stream]] = {}
    async with asyncio.timeout(WAIT_S):
        while len(found) < 2:
            stream = Stream(server, max_tokens=max_tokens)
            await stream.has_begun.wait()
            found.setdefault(holder_of(server, stream.port).pid, []).append(stream)
    return found


async def test_command_lines_tell_the_processes_apart(server: Server) -> None:
    assert [child.cmdline()[-2:] for child in children(server)] == [
        ["service.worker_process", "engine"],
        ["worker", "1"],
        ["worker", "2"],
    ]


async def test_any_worker_continues_a_session_and_reads_a_stream_that_another_began(server: Server) -> None:
    await server.create("one")
    body = {"input": "Once", "max_tokens": 30, "seed": 1, "ignore_eos": True, "stream": True}
    text, stream_id = "", ""
    async with server.client.stream("POST", "/v1/sessions/one/generate", json=body) as answer:
        async for piece in answer.aiter_text():
            text += piece
    frames = frames_of(text)
    stream_id = frames[0]["id"]
    for _ in range(8):  # connections of their own, which either worker may accept
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=WAIT_S) as client:
            again = await client.get(f"/v1/streams/{stream_id}")
            assert [frame["choices"] for frame in frames_of(again.text)] == [frame["choices"] for frame in frames]
            turn: dict[str, Any] = {"input": " more", "max_tokens": 2, "ignore_eos": True}
            assert (await client.post("/v1/sessions/one/generate", json=turn)).status_code == 200
    assert (await server.head("one"))[0] == 9


async def test_one_scrape_tells_of_all_processes(server: Server) -> None:
    ended, gaps = 'nsm_request_success_total{finished_reason="length"}', "nsm_inter_token_latency_seconds_count"
    tokens = "nsm_generation_tokens_total "

    async def number(name: str) -> float:
        lines = (await server.client.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def are_all_reported() -> bool:  # tokens by the engine, twice a second; gaps once, of other workers
        num_tokens, num_ended = await number(tokens), await number(ended)
        has_new = num_tokens - before[tokens] >= 18  # more, if reports of the tests before were still to come
        return has_new and num_ended - before[ended] == 6 and num_tokens == await number(gaps) + num_ended

    async def are_slots_known() -> bool:  # within a second of the worker's start
        return await number("nsm_max_slots ") == 16

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=WAIT_S) as client:
            assert (await client.post("/v1/completions", json={**BODY, "max_tokens": 3})).status_code == 200

    before = {name: await number(name) for name in (ended, tokens)}
    for _ in range(6):
        await ask()
    await eventually(are_all_reported, seconds=WAIT_S)
    await eventually(are_slots_known, seconds=WAIT_S)


async def test_a_worker_that_is_killed_takes_its_own_streams_and_is_replaced(victim: Server) -> None:
    with slow_steps():
        found = await streams_on_both(victim, max_tokens=300)
        lost, other = sorted(found, key=lambda pid: len(found[pid]))
        os.kill(lost, signal.SIGKILL)
    assert not any(await asyncio.gather(*(stream.task for stream in found[lost])))
    assert all(await asyncio.gather(*(stream.task for stream in found[other])))
    assert '"finish_reason":"length"' in found[other][0].text
    await eventually(lambda: has_all(victim), seconds=WAIT_S)
    await is_ready(victim)


async def test_an_engine_that_is_killed_ends_its_requests_and_is_replaced(victim: Server) -> None:
    engine = children(victim)[0]
    stream = Stream(victim, max_tokens=20_000)
    await stream.has_begun.wait()
    engine.kill()
    assert await stream.task
    assert '"code":"engine_dead"' in stream.text
    await is_ready(victim)
    answer = await victim.client.post("/v1/completions", json={**BODY, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4
    await eventually(lambda: has_all(victim), seconds=WAIT_S)


async def test_a_stop_lets_streams_finish_and_leaves_no_process(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with running(settings_of(tiny_model_dir), tmp_path / "data") as server:
        processes = children(server)
        stream = Stream(server, max_tokens=60)
        await stream.has_begun.wait()
        server.process.terminate()
        assert await stream.task
        assert await asyncio.wait_for(server.process.wait(), WAIT_S) == 0
        assert not psutil.wait_procs(processes, timeout=WAIT_S)[1]
        log = (await asyncio.wait_for(server.rest, WAIT_S)).decode()
        assert (log.count(" stopping: "), log.count(" stopped")) == (1, 1), log


async def test_second_ctrl_c_ends_every_process_at_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with running(settings_of(tiny_model_dir), tmp_path / "data", GRACE_S=600) as server:
        processes = children(server)
        stream = Stream(server, max_tokens=20_000)
        await stream.has_begun.wait()
        server.process.send_signal(signal.SIGTERM)
        await eventually(lambda: is_draining(server), seconds=WAIT_S)
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(server.process.wait(), WAIT_S) == 130
        assert not await stream.task
        assert not psutil.wait_procs(processes, timeout=WAIT_S)[1]


async def is_draining(server: Server) -> bool:
    """Whether the first signal was handled: workers take no new turns."""
    try:
        return (await server.client.get("/health/ready")).status_code == 503
    except httpx.TransportError:
        return True


async def test_worker_that_cannot_start_ends_the_server_with_its_reason(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The key's file is read by the workers."""
    with pytest.raises(RuntimeError, match=r"ConfigError: .*NSM_STATE_KEY_FILE"):
        async with running(
            settings_of(tiny_model_dir), tmp_path / "data", WORKERS=1, STATE_KEY_FILE=tmp_path / "absent"
        ):
            raise AssertionError("it serves")
