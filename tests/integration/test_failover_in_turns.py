"""Redis' master dies while gateways run turns on it: what had been copied stays, and the turn is done once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.redis import RedisSessionStore
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.models import local_backend
from tests.support.redis_servers import RedisServer, Topology, start_sentinel, wait_until
from tests.support.rwkv7 import rwkv7_backend

pytestmark = pytest.mark.redis
TEXTS = ("It was the best of times,", " and then")
FRAMES_BEFORE = 5  # of the second turn, when the master dies
BODY = {"max_tokens": 300, "ignore_eos": True, "seed": 7}


@pytest.fixture
def topology(tmp_path: Path) -> Iterator[Topology]:
    started = start_sentinel(tmp_path / "redis")
    yield started
    started.stop()


@pytest.fixture(params=[local_backend, rwkv7_backend], ids=["local", "rwkv7"])
def make_engine(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> Callable[[], LocalBackend]:
    return lambda: request.param(tiny_tokenizer)


@pytest.fixture
async def pair(topology: Topology, make_engine: Callable[[], LocalBackend]) -> AsyncIterator[tuple[Gateway, Gateway]]:
    address = parse_redis_url(topology.url)
    stores = [RedisSessionStore(address) for _ in range(2)]
    async with (
        gateway(make_engine(), store=stores[0], is_live=True, lease_s=2.0) as one,
        gateway(make_engine(), store=stores[1], is_live=True, lease_s=2.0) as two,
    ):
        yield one, two


async def test_D7_failover_in_mid_turn_loses_no_copied_turn_and_does_the_running_one_once(
    topology: Topology, pair: tuple[Gateway, Gateway], make_engine: Callable[[], LocalBackend]
) -> None:
    """Replication is asynchronous: an acknowledged turn that no replica has is lost with its master (docs/redis.md)."""
    async with gateway(make_engine()) as alone:
        await create(alone, "s")
        expected = [await insist(alone, "s", number) for number in range(2)]
    for round_number in range(scaled(1, 10)):
        name = f"s{round_number}"
        await create(pair[0], name)
        assert choices(await insist(pair[0], name, 0)) == choices(expected[0])
        master = await asyncio.to_thread(copied_master, topology)
        await kill_in_mid_turn(pair[0], name, master)
        second = await insist(pair[1], name, 1)
        assert choices(second) == choices(expected[1])
        assert second["usage"] == expected[1]["usage"]
        session = (await pair[1].client.get(f"/v1/sessions/{name}")).json()
        assert (session["version"], session["position"]) == (2, expected[1]["session"]["position"])
        assert choices(await insist(pair[0], name, 1)) == choices(expected[1])  # a retry, on the first one
        await asyncio.to_thread(master.start)  # comes back as a replica


async def create(server: Gateway, session_id: str) -> None:
    async def call() -> httpx.Response:
        return await server.client.post("/v1/sessions", json={"id": session_id})

    response = await patiently(call)
    assert response.status_code == 200, response.text


async def insist(server: Gateway, session_id: str, number: int) -> dict[str, Any]:
    """As stock clients do while the session is busy or the store away; always with the turn's own key."""

    async def call() -> httpx.Response:
        return await server.client.post(path(session_id), json=body(number), headers=key(number))

    response = await patiently(call)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def patiently(call: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    async with asyncio.timeout(60):
        while True:
            response = await call()
            if response.status_code == 200 or error_of(response)["code"] not in ("session_busy", "store_unavailable"):
                return response
            await asyncio.sleep(0.1)


async def kill_in_mid_turn(server: Gateway, session_id: str, master: RedisServer) -> None:
    """Reads the stream to its end, whatever that is."""
    num_frames = 0
    streamed = body(1) | {"stream": True}
    async with server.client.stream("POST", path(session_id), json=streamed, headers=key(1)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            num_frames += line.startswith("data: ")
            if num_frames == FRAMES_BEFORE:
                master.kill()
    assert num_frames > FRAMES_BEFORE


def copied_master(topology: Topology) -> RedisServer:
    """Once its replica has everything. One that was killed is a master too, and alone, until the Sentinels see it."""
    found: list[RedisServer] = []

    def is_copied() -> bool:
        found.extend(server for server in topology.servers if not server.is_sentinel and has_copy(server))
        return bool(found)

    wait_until(is_copied, "the copying to a replica")
    return found[0]


def has_copy(server: RedisServer) -> bool:
    with server.client() as client:
        if client.role()[0] != b"master":
            return False
        client.set("copied", 1)
        return bool(client.wait(1, 1_000) == 1)


def path(session_id: str) -> str:
    return f"/v1/sessions/{session_id}/generate"


def body(number: int) -> dict[str, Any]:
    return BODY | {"input": TEXTS[number]}


def key(number: int) -> dict[str, str]:
    return {"Idempotency-Key": f"turn-{number}"}


def choices(answer: dict[str, Any]) -> object:
    return answer["choices"]
