"""A real server that is told to stop in the middle of turns: their clients read on where they go on. So they do where
the server loses its supervisor.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.test_streams_survive import Reader, log_of
from tests.support.backends import PROCESSES
from tests.support.redis_servers import Topology
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps

GRACE_S = 0.01  # no turn of these tests is done by then: steps are slow
RESPONSE = {"input": "It was the best of times,", "stream": True, "max_output_tokens": 300, "temperature": 0}


class ResponseReader:
    """A client of one response; it fails the test when a number is missing or comes twice."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.must_reconnect = False
        self.has_begun = asyncio.Event()

    async def start(self, server: Server) -> None:
        async with server.client.stream("POST", "/v1/responses", json=RESPONSE) as stream:
            await self._read(stream)

    async def read_on(self, server: Server) -> None:
        self.must_reconnect = False
        path = f"/v1/responses/{self.events[0]['response']['id']}"
        query = {"stream": True, "starting_after": self.events[-1]["sequence_number"]}
        async with server.client.stream("GET", path, params=query) as stream:
            await self._read(stream)

    async def _read(self, stream: httpx.Response) -> None:
        assert stream.status_code == 200, await stream.aread()
        async for event in _data(stream):
            if event["type"] == "error":
                assert (event["code"], event["sequence_number"]) == ("server_stopping", len(self.events) - 1)
                self.must_reconnect = True
                return
            assert event["sequence_number"] == len(self.events)
            self.events.append(event)
            if event["type"] == "response.output_text.delta":
                self.has_begun.set()

    @property
    def answer(self) -> tuple[str, Any]:
        """The text by its pieces, and the counts."""
        last = self.events[-1]["response"]
        text = "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")
        assert last["output"][0]["content"][0]["text"] == text
        return text, last["usage"]


async def _data(stream: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def unbroken(server: Server) -> tuple[Reader, ResponseReader]:
    await server.create("unbroken")
    turn, response = Reader("unbroken"), ResponseReader()
    await turn.start(server)
    await response.start(server)
    return turn, response


async def stop_in_mid_turn(
    server: Server, turn: Reader, response: ResponseReader, sig: signal.Signals = signal.SIGTERM
) -> None:
    await server.create(turn.session_id)
    with slow_steps():
        async with asyncio.TaskGroup() as reading:
            reading.create_task(turn.start(server))
            reading.create_task(response.start(server))
            await turn.wait_for(3)
            await response.has_begun.wait()
            server.process.send_signal(sig)
    assert turn.must_reconnect
    assert response.must_reconnect
    assert await server.process.wait() == (0 if sig == signal.SIGTERM else -sig)


async def read_on_like(
    server: Server, turn: Reader, response: ResponseReader, expected: tuple[Reader, ResponseReader]
) -> None:
    await turn.read_on(server)
    await response.read_on(server)
    assert (turn.is_done, turn.text, turn.usage) == (True, expected[0].text, expected[0].usage)
    assert response.answer == expected[1].answer
    assert (await log_of(server, turn.session_id))["version"] == 1
    assert "nsm_turn_takeover_total 2.0" in (await server.client.get("/metrics")).text


@pytest.mark.redis
async def test_P3_R14_another_replica_goes_on_with_the_turns_of_one_that_stops(
    worker_settings: dict[str, object], tmp_path: Path, redis_single: Topology
) -> None:
    url = redis_single.own_url()
    turn, response = Reader("stopped"), ResponseReader()
    async with running(worker_settings, tmp_path / "survivor", STORE=url) as survivor:
        expected = await unbroken(survivor)
        async with running(worker_settings, tmp_path / "stopped", STORE=url, GRACE_S=GRACE_S) as server:
            await stop_in_mid_turn(server, turn, response)
        await read_on_like(survivor, turn, response, expected)


async def test_P3_R14_a_server_goes_on_with_its_turns_after_a_restart(
    worker_settings: dict[str, object], tmp_path: Path
) -> None:
    turn, response = Reader("stopped"), ResponseReader()
    async with running(worker_settings, tmp_path, GRACE_S=GRACE_S) as server:
        expected = await unbroken(server)
        await stop_in_mid_turn(server, turn, response)
    async with running(worker_settings, tmp_path) as server:
        await read_on_like(server, turn, response, expected)


@pytest.mark.timeout(400)  # up to ten processes that import torch, half of them at once
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def test_P3_R14_turns_go_on_after_kill_9_of_the_supervisor_alone(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path, processes: str, store: str
) -> None:
    """As after a stop, but nothing waits for the grace time: a next server may be there already."""
    settings: dict[str, object] = {"MODEL": tiny_model_dir, "NUM_THREADS": 1, **PROCESSES[processes]}
    if store == "redis":
        settings["STORE"] = request.getfixturevalue("redis_single").own_url()
    turn, response = Reader("orphan"), ResponseReader()
    async with running(settings, tmp_path, GRACE_S=600) as server:
        expected = await unbroken(server)
        children = psutil.Process(server.process.pid).children()
        await stop_in_mid_turn(server, turn, response, signal.SIGKILL)
        assert not (await asyncio.to_thread(psutil.wait_procs, children, timeout=60))[1]
    async with running(settings, tmp_path) as server:
        await read_on_like(server, turn, response, expected)
        retry = Reader("orphan")
        await retry.start(server)  # with the key of the first try
        assert retry.frames == turn.frames
