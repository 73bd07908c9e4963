"""Responses in the background at `nsm serve` with a worker whose engine's process is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil

from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps

WAIT_S = 240.0
BODY: dict[str, Any] = {"input": "Hello", "max_output_tokens": 900, "ignore_eos": True, "background": True, "seed": 7}


def engine_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    return next(child for child in children if child.cmdline()[-1] == "engine")


async def begin(server: Server, **fields: Any) -> str:
    answer = await server.client.post("/v1/responses", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def until_first_text(server: Server, response_id: str) -> None:
    path = f"/v1/responses/{response_id}"
    async with server.client.stream("GET", path, params={"stream": "true"}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data:") and "output_text.delta" in line:
                return
    raise AssertionError("the response ended before its first text")


async def end_of(server: Server, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await server.client.get(f"/v1/responses/{response_id}")
            assert answer.status_code == 200, answer.text
            if answer.json()["status"] != "in_progress":
                return dict(answer.json())
            await asyncio.sleep(0.1)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_P3_responses_in_the_background_go_on_when_their_engine_was_killed(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """They end with the text that they would have had; one that is cancelled before the next engine is up ends so."""
    settings = {"MODEL": tiny_model_dir, "NUM_THREADS": 1, "DEVICE": "cpu", "WORKERS": 1}
    async with running(settings, tmp_path / "data") as server:
        whole = await end_of(server, await begin(server))
        with slow_steps():
            ids = [await begin(server, max_output_tokens=20_000), await begin(server)]
            for response_id in ids:
                await until_first_text(server, response_id)
            engine_of(server).kill()
            cancelled, killed = ids
            await server.client.post(f"/v1/responses/{cancelled}/cancel")
        ended = await end_of(server, killed)
        assert (ended["error"], ended["usage"]["output_tokens"]) == (None, 900)
        assert (ended["status"], text_of(ended)) == (whole["status"], text_of(whole))
        assert (await end_of(server, cancelled))["status"] == "cancelled"
