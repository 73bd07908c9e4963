"""Several gateways on one machine share a SQLite file: each serves every session, and none undoes another's work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway

NUM_GATEWAYS, NUM_SESSIONS, NUM_TURNS = 3, 6, 4
TEXT = "it was the age of wisdom, it was the age of foolishness"


@pytest_asyncio.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                gateway(FakeBackend(TEXT), is_live=True, store=SqliteSessionStore(tmp_path / "sessions.db"))
            )
            for _ in range(NUM_GATEWAYS)
        ]


async def turn(server: Gateway, session_id: str, **fields: Any) -> dict[str, Any]:
    body = {"input": "x", "max_tokens": 6, **fields}
    answer = await server.client.post(f"/v1/sessions/{session_id}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_P4_turns_of_a_session_go_from_gateway_to_gateway(gateways: list[Gateway]) -> None:
    async def talk(number: int) -> None:
        session_id = f"s{number}"
        assert (await gateways[0].client.post("/v1/sessions", json={"id": session_id})).status_code == 200
        for turn_number in range(NUM_TURNS):
            server = gateways[(number + turn_number) % NUM_GATEWAYS]
            answer = await turn(server, session_id)
            assert answer["session"]["version"] == turn_number + 1
        heads = [(await server.client.get(f"/v1/sessions/{session_id}")).json() for server in gateways]
        assert heads[0]["version"] == NUM_TURNS
        assert heads == heads[:1] * NUM_GATEWAYS

    await asyncio.gather(*(talk(number) for number in range(NUM_SESSIONS)))


async def test_P5_two_gateways_never_write_one_session_at_once(gateways: list[Gateway], tmp_path: Path) -> None:
    held = FakeBackend(TEXT, hold=True)
    async with gateway(held, is_live=True, store=SqliteSessionStore(tmp_path / "sessions.db")) as slow:
        await slow.client.post("/v1/sessions", json={"id": "s"})
        first = asyncio.create_task(turn(slow, "s"))
        await held.held.wait()
        second = await gateways[0].client.post("/v1/sessions/s/generate", json={"input": "y", "max_tokens": 1})
        assert (second.status_code, error_of(second)["code"]) == (409, "session_busy")
        held.release_all()
        assert (await first)["session"]["version"] == 1
    assert (await turn(gateways[1], "s"))["session"]["version"] == 2


async def test_P11_a_stream_begun_at_one_gateway_is_read_at_another(gateways: list[Gateway]) -> None:
    await gateways[0].client.post("/v1/sessions", json={"id": "s"})
    body = {"input": "x", "max_tokens": 20, "stream": True}
    first = (await gateways[0].client.post("/v1/sessions/s/generate", json=body)).text
    stream_id = first.partition('"id":"')[2].partition('"')[0]
    again = (await gateways[1].client.get(f"/v1/streams/{stream_id}")).text
    assert again == first
