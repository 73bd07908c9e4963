"""Two gateways on one Redis behind the proxy of deploy/nginx are replaced in turn, while clients stream sessions and
come back as docs/sessions.md says: each text is that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.native_services import Proxy, proxy_service
from tests.support.counts import scaled
from tests.support.redis_servers import Topology, free_port
from tests.support.server_processes import Server, running

pytestmark = [pytest.mark.redis, pytest.mark.nginx, pytest.mark.timeout(scaled(180, 3600))]
NUM_CLIENTS = 20
NUM_TURNS = 3  # of each session
NUM_ROUNDS = scaled(1, 20)  # both gateways, one after the other
GRACE_S = 0.2  # most turns outlast it
BODY: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "stream": True, "seed": 7}
INPUTS = ("It was the best of times,", " and then", " at last")
LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)
AGAIN_S = 0.1  # before a client asks again; they are told a second


class Gateway:
    """One that is started again whenever it has ended, at the same address."""

    def __init__(self, settings: dict[str, object], directory: Path) -> None:
        self.port = free_port()
        self.exits: list[int] = []
        self._settings = {**settings, "PORT": self.port}
        self._directory = directory
        self._server: Server | None = None
        self._is_up = asyncio.Event()
        self._life = asyncio.create_task(self._live())

    async def up(self) -> Server:
        """Waits until it is ready."""
        waiting = asyncio.create_task(self._is_up.wait())
        await asyncio.wait((waiting, self._life), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert self._server is not None, self._life
        return self._server

    async def replace(self) -> None:
        """As an orchestrator does: SIGTERM, its end, another one."""
        server = await self.up()
        self._is_up.clear()
        server.process.send_signal(signal.SIGTERM)
        await server.process.wait()
        await self.up()

    async def stop(self) -> None:
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life

    async def _live(self) -> None:
        while True:
            async with running(self._settings, self._directory) as self._server:
                self._is_up.set()
                self.exits.append(await self._server.process.wait())


@dataclasses.dataclass
class Client:
    """Streams one session after the other, whatever happens to its connections."""

    http: httpx.AsyncClient
    name: str
    num_resumed: int = 0
    num_refused: int = 0

    async def converse(self, session_id: str) -> list[str]:
        """The texts of a whole session."""
        await self._ask("POST", "/v1/sessions", json={"id": session_id}, taken=409)
        return [await self._turn(session_id, number) for number in range(NUM_TURNS)]

    async def _turn(self, session_id: str, number: int) -> str:
        turn = Turn()
        while not turn.is_done:
            if turn.stream_id is None:  # not begun, or its first frame was lost
                path, headers = f"/v1/sessions/{session_id}/generate", {"Idempotency-Key": f"turn{number}"}
                method, body = "POST", {**BODY, "input": INPUTS[number]}
            else:
                self.num_resumed += 1
                path, headers = f"/v1/streams/{turn.stream_id}", {"Last-Event-ID": str(turn.last)}
                method, body = "GET", None
            with contextlib.suppress(*LOST):
                async with self.http.stream(method, path, headers=headers, json=body) as answer:
                    if answer.status_code == 200:
                        await turn.read(answer)
                        continue
                    self._refused(answer.status_code, await answer.aread())
            await asyncio.sleep(AGAIN_S)
        return turn.text

    async def _ask(self, method: str, path: str, *, json: Any = None, taken: int = 200) -> None:
        while True:
            with contextlib.suppress(*LOST):
                answer = await self.http.request(method, path, json=json)
                if answer.status_code in (200, taken):
                    return
                self._refused(answer.status_code, answer.content)
            await asyncio.sleep(AGAIN_S)

    def _refused(self, status: int, body: bytes) -> None:
        """Only what says that it is worth another try."""
        assert status == 503, (status, body)
        self.num_refused += 1


class Turn:
    """What came of it; a frame that comes twice, or one that is left out, fails the test."""

    def __init__(self) -> None:
        self.stream_id: str | None = None
        self.last = 0
        self.text = ""
        self.is_done = False

    async def read(self, answer: httpx.Response) -> None:
        number, must_reconnect = 0, False
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
                assert number > self.last
            elif line == "data: [DONE]":
                self.is_done = not must_reconnect
            elif line.startswith("data: "):
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    assert frame["error"]["code"] == "server_stopping", frame
                    must_reconnect = True
                else:
                    self.stream_id, self.last = frame["id"], number
                    self.text += frame["choices"][0]["text"]


@pytest.fixture(params=["tiny_model_dir", "rwkv7_dir"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.getfixturevalue(request.param)
    return directory


@pytest.fixture
async def gateways(tmp_path: Path, model_dir: Path, redis_single: Topology) -> AsyncIterator[list[Gateway]]:
    own = {"MODEL": model_dir, "NUM_THREADS": 1, "STORE": redis_single.own_url(), "GRACE_S": GRACE_S}
    both = [Gateway({**own, "LEASE_S": 1.0}, tmp_path / str(number)) for number in range(2)]
    try:
        for one in both:
            await one.up()
        yield both
    finally:
        for one in both:
            await one.stop()


@pytest.fixture
def proxy(gateways: list[Gateway], tmp_path: Path) -> Iterator[Proxy]:
    with proxy_service(tmp_path / "proxy", [f"127.0.0.1:{one.port}" for one in gateways]) as started:
        yield started


@contextlib.asynccontextmanager
async def visiting(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        yield client


async def test_T7_R14_a_rolling_restart_under_load_breaks_no_stream_that_is_read_on(
    gateways: list[Gateway], proxy: Proxy
) -> None:
    async with visiting(proxy.url) as http:
        expected = await Client(http, "undisturbed").converse("undisturbed")
        clients = [Client(http, f"client{number}") for number in range(NUM_CLIENTS)]
        is_over, sessions = asyncio.Event(), list[str]()

        async def keep_busy(client: Client) -> None:
            for number in itertools.count():
                session_id = f"{client.name}-{number}"
                assert await client.converse(session_id) == expected
                sessions.append(session_id)
                if is_over.is_set():
                    return

        async with asyncio.TaskGroup() as busy:
            for client in clients:
                busy.create_task(keep_busy(client))
            for _ in range(NUM_ROUNDS):
                for one in gateways:
                    await one.replace()
            is_over.set()

        end = (await http.get("/v1/sessions/undisturbed")).json()
        for session_id in sessions:
            head = (await http.get(f"/v1/sessions/{session_id}")).json()
            assert (head["version"], head["position"]) == (NUM_TURNS, end["position"])
    assert [one.exits for one in gateways] == [[0] * NUM_ROUNDS] * 2
    assert len(sessions) >= NUM_CLIENTS
    assert sum(client.num_resumed for client in clients) > NUM_ROUNDS  # it was no idle time
