"""The head names the replica that may have a session's state in memory: a hint, which may be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


async def name_of(server: Gateway) -> str:
    answer = (await server.client.get("/health/ready")).json()
    assert isinstance(answer["replica"], str)
    return answer["replica"]


async def hint(server: Gateway, session_id: str = "s1") -> str | None:
    answer: dict[str, Any] = (await server.client.get(f"/v1/sessions/{session_id}")).json()
    name: str | None = answer["replica"]
    return name


async def say(server: Gateway) -> dict[str, Any]:
    answer = await server.client.post("/v1/sessions/s1/generate", json={"input": "x", "max_tokens": 3})
    answer.raise_for_status()
    said: dict[str, Any] = answer.json()
    return said


async def test_a_session_names_the_replica_of_its_last_turn(path: Path) -> None:
    one, two = SqliteSessionStore(path), SqliteSessionStore(path)
    async with (
        gateway(FakeBackend(), store=one, port=8001) as first,
        gateway(FakeBackend(), store=two, port=8002) as second,
    ):
        assert await name_of(first) != await name_of(second)
        await first.client.post("/v1/sessions", json={"id": "s1"})
        assert await hint(first) is None  # no turn, no state
        await say(first)
        assert await hint(second) == await name_of(first)
        await say(second)
        assert await hint(first) == await name_of(second)
        await first.client.post("/v1/sessions/s1/rewind", json={"to_version": 1})
        assert await hint(first) is None  # nobody has the new state in memory
        fork = (await first.client.post("/v1/sessions/s1/fork")).json()["id"]
        assert await hint(first, fork) is None


async def test_a_wrong_hint_costs_tokens_read_again_and_nothing_else(path: Path) -> None:
    one, two = SqliteSessionStore(path), SqliteSessionStore(path)
    async with gateway(FakeBackend(), port=8003) as alone:
        await alone.client.post("/v1/sessions", json={"id": "s1"})
        undisturbed = [await say(alone) for _ in range(4)]
    async with gateway(FakeBackend(), store=one, port=8001) as first:
        await first.client.post("/v1/sessions", json={"id": "s1"})
        said = [await say(first)]
        gone = await name_of(first)
        async with gateway(FakeBackend(), store=two, port=8002) as second:
            said.append(await say(second))  # the hint named another one
            said.append(await say(first))  # it named one whose memory has an older state
            assert await hint(second) == gone
    async with gateway(FakeBackend(), store=SqliteSessionStore(path), port=8004) as late:
        assert await hint(late) == gone  # which has ended
        said.append(await say(late))
    assert [one["choices"][0]["text"] for one in said] == [one["choices"][0]["text"] for one in undisturbed]
    assert [one["session"] for one in said] == [one["session"] for one in undisturbed]
