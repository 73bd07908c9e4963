"""Two gateways, each with an engine of its own, on one Redis: a session does not care which of them it meets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.stores.redis.url import parse_redis_url
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.turns.turn import Turn
from tests.support.backends import MakeBackend
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, frames_of, gateway, until
from tests.support.redis_servers import Topology

pytestmark = pytest.mark.redis
TURNS = ("It was the best of times,", " and then", " at last", " the end")


@pytest.fixture
async def alone(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend()) as opened:
        yield opened


@pytest.fixture(params=["redis_single", "redis_cluster"])
async def pair(request: pytest.FixtureRequest, make_backend: MakeBackend) -> AsyncIterator[tuple[Gateway, Gateway]]:
    topology: Topology = request.getfixturevalue(request.param)
    address = parse_redis_url(topology.own_url())
    async with (
        gateway(make_backend(), store=RedisSessionStore(address)) as one,
        gateway(make_backend(), store=RedisSessionStore(address)) as two,
    ):
        yield one, two


async def create(server: Gateway, session_id: str) -> None:
    response = await server.client.post("/v1/sessions", json={"id": session_id})
    assert response.status_code == 200, response.text


async def say(server: Gateway, session_id: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"input": text, "max_tokens": 12, "ignore_eos": True, "logprobs": 1, **body}
    response = await server.client.post(f"/v1/sessions/{session_id}/generate", json=body)
    assert response.status_code == 200, response.text
    answer = dict(response.json())
    return {name: answer[name] for name in ("choices", "usage", "session")}


async def insist(server: Gateway, session_id: str, body: dict[str, Any]) -> httpx.Response:
    """Tries again while the answer is that the session is busy, as stock clients do."""
    while True:
        response = await server.client.post(
            f"/v1/sessions/{session_id}/generate", json=body, headers={"Idempotency-Key": "k"}
        )
        if response.status_code != 409:
            return response
        await asyncio.sleep(0.05)


async def begun_turn(server: Gateway, session_id: str) -> Turn:
    """The session's turn, once it runs."""
    running = server.services.turns._running
    key = SessionKey("default", session_id)
    await until(lambda: key in running)
    turn = running[key]
    await turn.begun.wait()
    return turn


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
async def test_P4_turns_on_random_replicas_equal_those_on_one_process(
    temperature: float, alone: Gateway, pair: tuple[Gateway, Gateway]
) -> None:
    rng = random.Random(1)
    for number in range(scaled(1, 50)):
        name, sampling = f"s{number}", {"temperature": temperature, "seed": number}
        await create(alone, name)
        await create(rng.choice(pair), name)
        for text in TURNS:
            expected = await say(alone, name, text, **sampling)
            found = await say(rng.choice(pair), name, text, **sampling)
            # covered by a state, or read again: the other replica may have had the newest state alone
            covered = [answer["usage"].pop("prompt_tokens_details") for answer in (expected, found)]
            assert sum(covered[1].values()) == covered[0]["cached_tokens"]
            assert found == expected


async def test_P5_two_turns_of_one_session_at_once_on_two_replicas_are_never_mixed(
    pair: tuple[Gateway, Gateway],
) -> None:
    await create(pair[0], "s")
    body = {"input": TURNS[0], "max_tokens": 8, "ignore_eos": True}
    posts = [server.client.post("/v1/sessions/s/generate", json=body) for _ in range(2) for server in pair]
    responses = await asyncio.gather(*posts)
    winners = [response for response in responses if response.status_code == 200]
    assert winners
    for response in responses:
        if response.status_code != 200:
            assert (response.status_code, error_of(response)["code"]) == (409, "session_busy")
            assert float(response.headers["retry-after"]) >= 0
    session = (await pair[1].client.get("/v1/sessions/s")).json()
    assert session["version"] == len(winners)


async def test_P1_what_one_replica_did_the_other_sees(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    await create(one, "s")
    assert (await two.client.get("/v1/sessions/s")).json()["version"] == 0
    await say(two, "s", TURNS[0])
    listed = (await one.client.get("/v1/sessions")).json()["data"]
    assert [(session["id"], session["version"]) for session in listed] == [("s", 1)]
    assert (await one.client.delete("/v1/sessions/s")).status_code == 200
    assert (await two.client.get("/v1/sessions/s")).status_code == 404


async def test_D9_a_storm_of_retries_on_two_replicas_runs_the_turn_once(pair: tuple[Gateway, Gateway]) -> None:
    for number in range(scaled(1, 50)):
        await create(pair[0], f"s{number}")
        body = {"input": TURNS[0], "max_tokens": 64, "ignore_eos": True}  # no seed: two runs would differ
        responses = await asyncio.gather(*(insist(server, f"s{number}", body) for _ in range(5) for server in pair))
        assert {response.status_code for response in responses} == {200}
        assert all(response.json() == responses[0].json() for response in responses)
        assert (await pair[1].client.get(f"/v1/sessions/s{number}")).json()["version"] == 1


async def test_S10_a_turn_is_read_on_the_other_replica_while_it_runs(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    await create(one, "s")
    body = {"input": TURNS[0], "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 1}
    streaming = asyncio.create_task(one.client.post("/v1/sessions/s/generate", json=body))
    turn = await begun_turn(one, "s")
    response = await two.client.get(f"/v1/streams/{turn.turn_id}", params={"starting_after": 20})
    whole, rest = frames_of((await streaming).text), frames_of(response.text)
    assert rest == whole[len(whole) - len(rest) :]
    assert len(whole) > len(rest) > 100


async def test_S8_a_cancel_reaches_the_replica_that_runs_the_turn(pair: tuple[Gateway, Gateway]) -> None:
    one, two = pair
    await create(one, "s")
    body = {"input": TURNS[0], "max_tokens": 20_000, "ignore_eos": True}
    posting = asyncio.create_task(one.client.post("/v1/sessions/s/generate", json=body))
    await begun_turn(one, "s")
    assert (await two.client.post("/v1/sessions/s/cancel")).json()["cancelled"] is True
    assert error_of(await posting)["code"] == "turn_cancelled"
    assert (await say(two, "s", TURNS[0]))["session"]["version"] == 1


async def test_D2_the_pool_in_use_is_a_metric(pair: tuple[Gateway, Gateway], alone: Gateway) -> None:
    await create(pair[0], "s")
    assert "nsm_redis_pool_in_use 0.0" in (await pair[0].client.get("/metrics")).text
    assert "nsm_redis_pool_in_use" not in (await alone.client.get("/metrics")).text
