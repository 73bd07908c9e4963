"""Whole conversations on two replicas with all that goes wrong in them, against the same calls on one process."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from nsm_core.architectures import load_model
from nsm_core.config import EngineConfig
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from tests.support.backends import MakeBackend, triton_backend
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.redis_servers import Topology
from tests.support.rwkv7 import save_rwkv7
from tests.support.triton_servers import RunningTriton, running_triton

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.redis
NUM_SESSIONS, NUM_TURNS = scaled(4, 200), scaled(5, 10)
NUM_AT_ONCE = scaled(4, 16)
# One row a step in each engine: neighbours would change the last bits, and a draw in some ten thousand with them.
LIMITS = {"max_slots": 1, "token_budget": 256, "queue_limit": 64}
TEXTS = ("It was the best of times,", " and then", " at last", " the end", " who is there?")

# what happens to a turn on its way: two clients ask for it; its client leaves and asks again; a long turn before it is
# cancelled; it is cancelled itself, at any moment, and asked for again
Trouble = Literal["none", "retry", "leave", "cancel before", "cancel"]
TROUBLES: tuple[Trouble, ...] = ("none", "none", "retry", "leave", "cancel before", "cancel")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One call that changes a session; `trouble` only befalls it on the replicas."""

    session_id: str
    action: Literal["", "generate", "fork", "rewind"]  # "": create it
    body: dict[str, Any]
    trouble: Trouble = "none"


def make_life(name: str, rng: random.Random, *, temperature: float) -> list[Step]:
    """Steps of one session and its forks. `versions`: those each can go back to, 0 where its log is empty."""
    steps, versions = [Step(name, "", {"id": name})], {name: [0]}
    for turn in range(NUM_TURNS):
        session_id = rng.choice(sorted(versions))
        known = versions[session_id]
        body = {"input": rng.choice(TEXTS), "max_tokens": rng.randint(1, 24), "temperature": temperature}
        seed = {"seed": rng.randrange(1000)} if len(known) == 1 else {}  # the session keeps it
        steps.append(Step(session_id, "generate", body | seed, rng.choice(TROUBLES)))
        known.append(known[-1] + 1)
        if rng.random() < 0.2:
            fork_id = f"{name}-{turn}"
            steps.append(Step(session_id, "fork", {"id": fork_id}))
            versions[fork_id] = list(known)
        if rng.random() < 0.2:
            index = rng.randrange(1, len(known))
            steps.append(Step(session_id, "rewind", {"to_version": known[index]}))
            versions[session_id] = [*known[: index + 1], known[-1] + 1]
    return steps


@dataclasses.dataclass(slots=True)
class Caller:
    """Sends each call to any of `servers`, and a turn until it is done; counts what happened."""

    servers: tuple[Gateway, ...]
    rng: random.Random
    seen: collections.Counter[str]

    async def call(self, step: Step, number: int) -> dict[str, Any]:
        self.seen[step.action] += 1
        if step.action == "generate":
            return await self._turn(step, f"key-{number}")
        path = f"/v1/sessions/{step.session_id}/{step.action}" if step.action else "/v1/sessions"
        response = await self._any().client.post(path, json=step.body)
        assert response.status_code == 200, response.text
        return {name: response.json()[name] for name in ("id", "version", "position")}

    async def _turn(self, step: Step, key: str) -> dict[str, Any]:
        if len(self.servers) > 1:
            self.seen[step.trouble] += 1
            if step.trouble == "leave":
                await self._leave(step, key)
            elif step.trouble == "cancel before":
                await self._cancel_long_turn(step)
            elif step.trouble == "cancel":
                await self._cancel(step, key)
        num_clients = 2 if step.trouble == "retry" and len(self.servers) > 1 else 1
        answers = await asyncio.gather(*(self._insist(step, key) for _ in range(num_clients)))
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    async def _insist(self, step: Step, key: str) -> dict[str, Any]:
        """As stock clients do: a session that is busy is asked again."""
        while True:
            response = await self._post(step, key)
            if response.status_code == 200:
                answer = dict(response.json())
                return {name: answer[name] for name in ("choices", "usage", "session")}
            assert error_of(response)["code"] == "session_busy"
            await asyncio.sleep(0.02)

    async def _leave(self, step: Step, key: str) -> None:
        num_lines = self.rng.randrange(1, 10)
        async with self._any().client.stream(
            "POST", path_of(step), json=body_of(step) | {"stream": True}, headers={"Idempotency-Key": key}
        ) as response:
            async for _ in response.aiter_lines():
                num_lines -= 1
                if not num_lines:
                    return

    async def _cancel_long_turn(self, step: Step) -> None:
        long = dataclasses.replace(step, body=step.body | {"max_tokens": 30_000})
        posting = asyncio.create_task(self._post(long, f"long-{self.rng.random()}"))
        await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        await self._cancel_for_sure(step)
        assert error_of(await posting)["code"] == "turn_cancelled"
        self.seen["cancelled"] += 1

    async def _cancel(self, step: Step, key: str) -> None:
        posting = asyncio.create_task(self._post(step, key))
        await asyncio.sleep(self.rng.uniform(0.0, 0.03))
        await self._cancels(step)
        response = await posting
        if response.status_code != 200:
            assert error_of(response)["code"] == "turn_cancelled"
            self.seen["cancelled"] += 1

    async def _cancel_for_sure(self, step: Step) -> None:
        while True:  # it may run in the other gateway, which has no event to wait for
            if await self._cancels(step):
                return
            await asyncio.sleep(0.005)

    async def _cancels(self, step: Step) -> bool:
        """Whether there was a turn to be cancelled."""
        response = await self._any().client.post(f"/v1/sessions/{step.session_id}/cancel")
        return bool(response.json()["cancelled"])

    async def _post(self, step: Step, key: str) -> httpx.Response:
        return await self._any().client.post(path_of(step), json=body_of(step), headers={"Idempotency-Key": key})

    def _any(self) -> Gateway:
        return self.rng.choice(self.servers)


def path_of(step: Step) -> str:
    return f"/v1/sessions/{step.session_id}/generate"


def body_of(step: Step) -> dict[str, Any]:
    return {"ignore_eos": True, "logprobs": 0, **step.body}


@pytest.fixture(scope="module", params=["nsm", "rwkv7"])
def model_dir(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokenizer: Tokenizer,
) -> Path:
    if request.param == "nsm":
        return tiny_model_dir
    return save_rwkv7(tmp_path_factory.mktemp("rwkv7") / "small", tiny_tokenizer)


@pytest.fixture(scope="module")
def one_row_triton(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[RunningTriton]:
    limits = {name: str(value) for name, value in LIMITS.items()}
    with running_triton(tmp_path_factory.mktemp("one-row"), model_dir, **limits) as server:
        yield server


@pytest.fixture(params=["local", pytest.param("triton", marks=pytest.mark.triton)])
def make_replica_backend(request: pytest.FixtureRequest, model_dir: Path) -> MakeBackend:
    if request.param == "local":
        return lambda: engine_of(model_dir)
    server: RunningTriton = request.getfixturevalue("one_row_triton")
    return lambda: triton_backend(server)


def engine_of(model_dir: Path) -> LocalBackend:
    return LocalBackend(load_model(model_dir), EngineConfig(**LIMITS))


@pytest.fixture
async def alone(model_dir: Path) -> AsyncIterator[Gateway]:
    """On an engine of its own, whatever the replicas run on."""
    async with gateway(engine_of(model_dir), snapshot_tokens=0) as opened:
        yield opened


@pytest.fixture
async def pair(redis_single: Topology, make_replica_backend: MakeBackend) -> AsyncIterator[tuple[Gateway, Gateway]]:
    address = parse_redis_url(redis_single.own_url())
    async with (
        gateway(make_replica_backend(), store=RedisSessionStore(address), is_live=True, snapshot_tokens=0) as one,
        gateway(make_replica_backend(), store=RedisSessionStore(address), is_live=True, snapshot_tokens=0) as two,
    ):
        yield one, two


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
async def test_P4_lives_on_random_replicas_equal_those_on_one_process(
    temperature: float, alone: Gateway, pair: tuple[Gateway, Gateway]
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    turns_at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def live(number: int) -> None:
        rng = random.Random(number)
        steps = make_life(f"s{number}", rng, temperature=temperature)
        one, many = Caller((alone,), rng, collections.Counter()), Caller(pair, rng, seen)
        async with turns_at_once:
            for index, step in enumerate(steps):
                assert await many.call(step, index) == await one.call(step, index), (number, step)
            for session_id in sorted({step.session_id for step in steps}):
                await assert_same_session(alone, pair[0], session_id)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_SESSIONS):
            group.create_task(live(number))
    assert seen["generate"] == NUM_SESSIONS * NUM_TURNS
    assert min(seen[name] for name in ("fork", "rewind", "retry", "leave", "cancelled")) > 0, seen
    logger.info("%s", dict(seen))  # shown by --log-cli-level=INFO


async def assert_same_session(one: Gateway, two: Gateway, session_id: str) -> None:
    key = SessionKey("default", session_id)
    stores = [server.services.store for server in (one, two)]
    logs = [(await store.read_log(key), await store.log_marks(key)) for store in stores]
    assert logs[0] == logs[1]
    expected, got = [Snapshot.decode(raw) for store in stores if (raw := (await store.load(key)).snapshot)]
    for name in ("position", "pending_id", "sampler", "version"):
        assert getattr(got.header, name) == getattr(expected.header, name)
    assert got.state == expected.state
