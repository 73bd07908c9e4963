"""Random operations on sessions while the Triton servers under their gateway are killed and started again: each turn is
that of a gateway whose server nobody kills, or is refused by name and has changed nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.backends.triton.backend import TritonBackend
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.triton_servers import RunningTriton, eventually, running_triton
from tests.support.triton_stand_in import StandIn, hurry, random_loaded

NUM_WALKS, NUM_STEPS = scaled(2, 50), scaled(25, 60)
NAMES = ("s1", "s2", "s3")
UP_S = 120.0  # for a server that was started to be used again


class Server(Protocol):
    """One that may be killed, and started again at the same address."""

    url: str

    async def start(self) -> None: ...

    async def kill(self) -> None: ...


class Imitated:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._server = StandIn(random_loaded(tokenizer))
        self.url = self._server.url

    async def start(self) -> None:
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop()


class Real:
    def __init__(self, server: RunningTriton) -> None:
        self._server = server
        self.url = server.grpc_url

    async def start(self) -> None:
        if not self._server.is_running:
            await asyncio.to_thread(self._server.start)

    async def kill(self) -> None:
        await asyncio.to_thread(self._server.kill)


@contextlib.asynccontextmanager
async def on(servers: list[Server], path: Path) -> AsyncIterator[Gateway]:
    backend = TritonBackend([server.url for server in servers], wait_s=UP_S)
    async with gateway(backend, store=SqliteSessionStore(path), retained_snapshots=2) as server:
        yield server


class Walk:
    """The same calls to a gateway on servers that are killed and to one in peace."""

    def __init__(self, shaken: Gateway, calm: Gateway, servers: list[Server], rng: random.Random) -> None:
        self.shaken, self.calm, self.servers, self.rng = shaken, calm, servers, rng
        self.is_up = dict.fromkeys(range(len(servers)), True)
        self.num_refused = 0

    async def step(self) -> None:
        steps: list[tuple[Callable[[], Any], int]] = [
            (self.kill, 3),
            (self.restart, 3),
            (self.turn, 8),
            (self.turn_in_which_a_server_dies, 4),
            (self.rewind, 2),
            (self.fork, 1),
            (self.delete, 1),
        ]
        (chosen,) = self.rng.choices([step for step, _ in steps], [weight for _, weight in steps])
        await chosen()
        assert await heads(self.shaken) == await heads(self.calm)

    async def kill(self) -> None:
        up = [number for number, is_up in self.is_up.items() if is_up]
        if up:
            number = self.rng.choice(up)
            self.is_up[number] = False
            await self.servers[number].kill()

    async def restart(self) -> None:
        for number, is_up in self.is_up.items():
            if not is_up:
                self.is_up[number] = True
                await self.servers[number].start()
                break
        await eventually(self.all_are_seen, seconds=UP_S)

    async def all_are_seen(self) -> bool:
        backend = self.shaken.services.backend
        assert isinstance(backend, TritonBackend)
        return sum(upstream.is_up for upstream in backend.upstreams) >= sum(self.is_up.values())

    async def turn(self) -> None:
        name = await self.session()
        body = self.body()
        answer = await say(self.shaken, name, body)
        await self.compare(answer, name, body)

    async def turn_in_which_a_server_dies(self) -> None:
        name = await self.session()
        body = self.body() | {"max_tokens": 60}
        turn = asyncio.create_task(say(self.shaken, name, body))
        for _ in range(self.rng.randrange(60)):
            await asyncio.sleep(0)
        await self.kill()
        await self.compare(await turn, name, body)

    async def compare(self, answer: httpx.Response, name: str, body: dict[str, Any]) -> None:
        if answer.status_code != 200:
            assert error_of(answer)["code"] in ("engine_dead", "overloaded", "deadline_exceeded"), answer.text
            self.num_refused += 1
            return
        expected = (await say(self.calm, name, body)).json()
        for part in ("choices", "usage", "session"):
            assert without_times(answer.json()[part]) == without_times(expected[part]), part

    async def rewind(self) -> None:
        """Reads a part of the log again, for which a server is needed."""
        name = await self.session()
        position = (await heads(self.calm))[name][1]
        body = {"to_position": self.rng.randrange(position + 1)}
        answer = await self.shaken.client.post(f"/v1/sessions/{name}/rewind", json=body)
        if answer.status_code == 200:
            assert (await self.calm.client.post(f"/v1/sessions/{name}/rewind", json=body)).status_code == 200
        else:
            assert error_of(answer)["code"] in ("engine_dead", "overloaded", "deadline_exceeded"), answer.text

    async def fork(self) -> None:
        name, new = await self.session(), self.rng.choice(NAMES)
        if new not in await heads(self.calm):
            for one in (self.shaken, self.calm):
                assert (await one.client.post(f"/v1/sessions/{name}/fork", json={"id": new})).status_code == 200

    async def delete(self) -> None:
        name = await self.session()
        for one in (self.shaken, self.calm):
            assert (await one.client.delete(f"/v1/sessions/{name}")).status_code == 200

    async def session(self) -> str:
        name = self.rng.choice(NAMES)
        if name not in await heads(self.calm):
            for one in (self.shaken, self.calm):
                assert (await one.client.post("/v1/sessions", json={"id": name})).status_code == 200
        return name

    def body(self) -> dict[str, Any]:
        ids = [self.rng.randrange(1, 500) for _ in range(self.rng.choice((1, 3, 40)))]
        return {
            "input": ids,
            "max_tokens": self.rng.randrange(1, 20),
            "seed": self.rng.randrange(9),
            "ignore_eos": True,
        }


async def say(server: Gateway, name: str, body: dict[str, Any]) -> httpx.Response:
    return await server.client.post(f"/v1/sessions/{name}/generate", json=body)


def without_times(part: Any) -> Any:
    return {name: value for name, value in part.items() if not name.endswith("_at")} if isinstance(part, dict) else part


async def heads(server: Gateway) -> dict[str, tuple[int, int]]:
    """Version and number of tokens by session."""
    listed = (await server.client.get("/v1/sessions")).json()["data"]
    return {one["id"]: (one["version"], one["position"]) for one in listed}


async def stored(server: Gateway, name: str) -> tuple[tuple[int, ...], bytes | None]:
    """The log, and the bytes of the state."""
    key = SessionKey("default", name)
    snapshot = (await server.store.load(key)).snapshot
    return await server.store.read_log(key), None if snapshot is None else Snapshot.decode(snapshot).state


async def walk(servers: list[Server], calm_server: Server, path: Path, seed: int) -> None:
    async with on(servers, path / "shaken.db") as shaken, on([calm_server], path / "calm.db") as calm:
        walking = Walk(shaken, calm, servers, random.Random(seed))
        for _ in range(NUM_STEPS):
            await walking.step()
        while not all(walking.is_up.values()):
            await walking.restart()
        for name in await heads(calm):
            assert await stored(shaken, name) == await stored(calm, name)
            answers = [(await say(one, name, {"input": [5], "max_tokens": 9, "seed": 1})) for one in (shaken, calm)]
            assert answers[0].status_code == 200, answers[0].text
            assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize("seed", range(NUM_WALKS))
async def test_T2_R14_killed_servers_change_no_session(
    tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    hurry(monkeypatch)
    servers: list[Server] = [Imitated(tiny_tokenizer) for _ in range(3)]
    try:
        for server in servers:
            await server.start()
        await walk(servers[:2], servers[2], tmp_path, seed)
    finally:
        for server in servers:
            await server.kill()


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_T2_R14_killed_triton_servers_change_no_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [
            Real(stack.enter_context(running_triton(tmp_path / str(number), tiny_model_dir))) for number in range(3)
        ]
        await walk(servers[:2], servers[2], tmp_path, 1)
