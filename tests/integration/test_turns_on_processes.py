"""Streams, cancels and retries at `nsm serve` as one process, with workers, and with an engine on each of two devices.

Each call has a connection of its own, which any worker may accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.backends import PROCESSES
from tests.support.gateway import frames_of
from tests.support.server_processes import Server, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_S = 120.0
BODY: dict[str, Any] = {"input": "Once", "max_tokens": 120, "seed": 7, "ignore_eos": True}
KEY = {"Idempotency-Key": "k"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one", *PROCESSES])
async def server(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    settings = {"MODEL": tiny_model_dir, "NUM_THREADS": 1, **PROCESSES.get(request.param, {"DEVICE": "cpu"})}
    async with running(settings, tmp_path_factory.mktemp(request.param)) as started:
        yield started


@contextlib.asynccontextmanager
async def connection(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.client.base_url, timeout=WAIT_S) as client:
        yield client


async def post(
    server: Server, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    async with connection(server) as client:
        return await client.post(f"/v1/sessions/{path}", json=body, headers=headers)


async def unbroken(server: Server, session_id: str) -> dict[str, Any]:
    """A turn of a session that nobody disturbs."""
    await server.create(session_id)
    answer = await post(server, f"{session_id}/generate", BODY)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def first_frames(lines: AsyncIterator[str], num_frames: int) -> list[tuple[int, dict[str, Any]]]:
    """So many frames, with their numbers."""
    frames, number = [], 0
    async for line in lines:
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            frames.append((number, json.loads(line.removeprefix("data: "))))
            if len(frames) == num_frames:
                return frames
    raise AssertionError(f"the stream ended after {len(frames)} frames")


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for frame in frames for choice in frame["choices"])


async def test_D9_retries_get_the_one_turn_while_it_runs_and_afterwards(server: Server) -> None:
    whole = await unbroken(server, "retry-0")
    await server.create("retry")
    tries = await asyncio.gather(*(post(server, "retry/generate", BODY, KEY) for _ in range(4)))
    tries.append(await post(server, "retry/generate", BODY, KEY))
    assert [answer.status_code for answer in tries] == [200] * 5
    assert all(answer.json() == tries[0].json() for answer in tries)
    assert sum(answer.headers.get("idempotent-replayed") == "true" for answer in tries) == 4
    assert tries[0].json()["choices"] == whole["choices"]
    assert (await server.head("retry")) == (1, whole["session"]["position"])


async def test_S8_a_cancel_on_any_connection_ends_the_turn_and_keeps_nothing(server: Server) -> None:
    whole = await unbroken(server, "cancel-0")
    await server.create("cancel")
    for _ in range(4):
        async with connection(server) as client:
            body = {**BODY, "max_tokens": 20_000, "stream": True}
            async with client.stream("POST", "/v1/sessions/cancel/generate", json=body) as stream:
                lines = stream.aiter_lines()
                await first_frames(lines, 3)
                cancelled = await post(server, "cancel/cancel", {})
                rest = [line async for line in lines]
        assert (cancelled.status_code, cancelled.json()["cancelled"]) == (200, True)
        assert any('"code":"turn_cancelled"' in line for line in rest)
        assert await server.head("cancel") == (0, 0)
    answer = (await post(server, "cancel/generate", BODY)).json()
    assert answer["choices"] == whole["choices"]


async def test_S10_a_client_that_leaves_reads_on_from_any_worker(server: Server) -> None:
    whole = await unbroken(server, "leave-0")
    for number in range(1, 4):
        session_id = f"leave-{number}"
        await server.create(session_id)
        async with connection(server) as client:
            body = {**BODY, "stream": True}
            path = f"/v1/sessions/{session_id}/generate"
            async with client.stream("POST", path, json=body, headers=KEY) as stream:
                seen = await first_frames(stream.aiter_lines(), 4 * number)
        async with connection(server) as client:
            headers = {"Last-Event-ID": str(seen[-1][0])}
            rest = await client.get(f"/v1/streams/{seen[-1][1]['id']}", headers=headers)
        assert rest.status_code == 200, rest.text
        frames = [*(frame for _, frame in seen), *frames_of(rest.text)]
        assert text_of(frames) == whole["choices"][0]["text"]
        again = await post(server, f"{session_id}/generate", {**BODY, "stream": True}, KEY)
        assert text_of(frames_of(again.text)) == whole["choices"][0]["text"]
        assert await server.head(session_id) == (1, whole["session"]["position"])
