"""Gateways are killed at random times while clients talk: each turn is the one that nobody disturbed, once.

A client says a turn again, with its key, until it has an answer. It may go to any replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.tokenizer import Tokenizer
from service.settings import Settings
from service.stores.sessions.base import SessionStore
from service.stores.sessions.factory import make_store
from service.stores.sessions.key import SessionKey
from service.transfer.verify import verify
from tests.support.counts import scaled
from tests.support.killable_gateways import Killable, Nursery, nursery
from tests.support.redis_servers import Topology, start_single
from tests.support.rwkv7 import rwkv7_backend
from tests.support.stored_sessions import opened

NUM_KILLS = scaled(3, 250)  # of each case
NAMES = ("s1", "s2", "s3")
SETTINGS: dict[str, Any] = {"lease_s": 1.0, "snapshot_tokens": 16, "retained_snapshots": 1}
AGAIN = (409, 503)  # statuses of a session that another one has, and of a server that has just started
PAUSE_S = 0.02  # of a client between two tries


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store_settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    if request.param == "sqlite":
        return {"store": f"sqlite:///{tmp_path}/sessions.db"}
    topology: Topology = request.getfixturevalue("redis_single")
    return {"store": topology.own_url()}


def body_of(name: str, number: int) -> dict[str, Any]:
    """The same in both lives. Log-probabilities tell states apart that texts do not."""
    rng = random.Random(f"{name} {number}")
    ids = [rng.randrange(1, 500) for _ in range(rng.choice((1, 8, 60)))]
    return {"input": ids, "max_tokens": rng.randrange(1, 40), "ignore_eos": True, "logprobs": 1, "seed": number}


def what_counts(answer: dict[str, Any]) -> dict[str, Any]:
    """Less times and names, and less what tells where the state came from."""
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": answer["choices"], "session": answer["session"], "usage": usage}


class Fleet:
    """The replicas on one store."""

    def __init__(self, made: Nursery, settings: dict[str, Any]) -> None:
        self._made = made
        self._settings = settings
        self._is_up = asyncio.Event()
        self.replicas: list[Killable] = []

    async def start(self) -> None:
        self.replicas.append(await self._made.start(**self._settings))
        self._is_up.set()

    async def kill_one(self, rng: random.Random) -> None:
        """And start another one in its place."""
        killed = self.replicas.pop(rng.randrange(len(self.replicas)))
        if not self.replicas:
            self._is_up.clear()
        killed.kill()
        await self.start()

    async def any_url(self, rng: random.Random) -> str:
        await self._is_up.wait()
        return rng.choice(self.replicas).url


class Talk:
    """One client of one session. `answers`: of its turns, in order."""

    def __init__(self, name: str, fleet: Fleet, client: httpx.AsyncClient) -> None:
        self.name = name
        self.answers: list[dict[str, Any]] = []
        self.is_over = False
        self._fleet = fleet
        self._client = client
        self._rng = random.Random(name)

    async def run(self) -> None:
        while not self.is_over:
            await self.say()

    async def say(self) -> None:
        number = len(self.answers)
        headers, body = {"Idempotency-Key": f"turn-{number}"}, body_of(self.name, number)
        while True:
            url = f"{await self._fleet.any_url(self._rng)}/v1/sessions/{self.name}/generate"
            with contextlib.suppress(httpx.TransportError):
                answer = await self._client.post(url, json=body, headers=headers)
                if answer.status_code == 200:
                    self.answers.append(what_counts(answer.json()))
                    return
                assert answer.status_code in AGAIN, answer.text
            await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def talks(
    made: Nursery, settings: dict[str, Any], *, num_replicas: int
) -> AsyncIterator[tuple[Fleet, list[Talk]]]:
    """Clients of new sessions on so many gateways."""
    fleet = Fleet(made, SETTINGS | settings)
    for _ in range(num_replicas):
        await fleet.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        for name in NAMES:
            (await client.post(f"{fleet.replicas[0].url}/v1/sessions", json={"id": name})).raise_for_status()
        yield fleet, [Talk(name, fleet, client) for name in NAMES]


def store_of(settings: dict[str, Any]) -> SessionStore:
    return make_store(Settings(**SETTINGS, **settings))


Disturbance = Callable[[Fleet, random.Random], Awaitable[None]]


async def kill_a_gateway(fleet: Fleet, rng: random.Random) -> None:
    await fleet.kill_one(rng)


async def compare_with_a_calm_life(
    settings: dict[str, Any], disturb: Disturbance, *, num_replicas: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Clients talk while `disturb` is called again and again; then the same turns are said where nothing happens."""
    tokenizer.save(tmp_path / "tokenizer.json")
    rng = random.Random(num_replicas)
    calm_settings = {"store": f"sqlite:///{tmp_path}/calm.db"}
    async with nursery(tmp_path / "tokenizer.json") as made:
        async with talks(made, settings, num_replicas=num_replicas) as (fleet, shaken):
            running = [asyncio.create_task(talk.run()) for talk in shaken]
            for _ in range(NUM_KILLS):
                await asyncio.sleep(rng.uniform(0.0, 0.5))  # a random time, the subject of this test
                await disturb(fleet, rng)
            for talk in shaken:
                talk.is_over = True
            await asyncio.gather(*running)
        async with talks(made, calm_settings, num_replicas=1) as (_, calm):
            for talk, other in zip(shaken, calm, strict=True):
                for expected in talk.answers:
                    await other.say()
                    assert other.answers[-1] == expected
    async with opened(store_of(settings)) as store, opened(store_of(calm_settings)) as calm_store:
        backend, keys = rwkv7_backend(tokenizer), [SessionKey("default", name) for name in NAMES]
        for key in keys:
            assert await store.read_log(key) == await calm_store.read_log(key)
            assert await store.log_marks(key) == await calm_store.log_marks(key)
        await backend.start()
        assert {one.verdict async for one in verify(store, backend, keys)} <= {"same", "no_state"}
        await backend.stop()


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_R14_no_turn_is_lost_or_doubled_by_random_kills(
    store_settings: dict[str, str], num_replicas: int, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    await compare_with_a_calm_life(
        store_settings, kill_a_gateway, num_replicas=num_replicas, tmp_path=tmp_path, tokenizer=tiny_tokenizer
    )


@pytest.mark.redis
async def test_D7_R14_no_turn_is_lost_or_doubled_when_redis_is_killed_too(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    """With `appendfsync always`; two gateways, of which now and then one is killed as well."""
    topology = start_single(tmp_path / "redis", "appendonly yes", "appendfsync always")
    server = topology.servers[0]

    async def kill_redis_or_a_gateway(fleet: Fleet, rng: random.Random) -> None:
        if rng.random() < 0.3:
            await fleet.kill_one(rng)
            return
        server.kill()
        await asyncio.sleep(rng.uniform(0.0, 0.3))  # turns and clients find nobody there
        server.start()

    try:
        await compare_with_a_calm_life(
            {"store": topology.own_url()},
            kill_redis_or_a_gateway,
            num_replicas=2,
            tmp_path=tmp_path,
            tokenizer=tiny_tokenizer,
        )
    finally:
        topology.stop()
