"""Server processes that are killed with -9 while they run a batch: no line is lost, and none is there twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import input_of, lines_of
from tests.support.counts import scaled
from tests.support.redis_servers import Topology, own_prefix
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps

NUM_LINES = 10
NUM_KILLS = scaled(2, 8)
# Batches take half of the slots, so lines run one at a time: their texts must be those of lone requests, and the eager
# executor's sums depend on how many rows run together.
MAX_SLOTS = 2
NUM_TOKENS = 100
NUM_STEPS = NUM_TOKENS + 20  # more than of one line, less than of two
BODIES = [
    {
        "prompt": f"It was number {number},",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "seed": number,
        "temperature": 1.0,
    }
    for number in range(NUM_LINES)
]


async def begin(server: Server) -> str:
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", input_of(*BODIES))}, "data": {"purpose": "batch"}}
    file = (await server.client.post("/v1/files", **form)).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((await server.client.post("/v1/batches", json=body)).json()["id"])


async def wait_for(server: Server, batch_id: str, *, num_completed: int) -> dict[str, Any]:
    """The batch when it has ended, or has so many results."""
    while True:
        batch: dict[str, Any] = (await server.client.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] == "completed" or batch["request_counts"]["completed"] >= num_completed:
            return batch
        await asyncio.sleep(0.02)


async def test_a_batch_that_is_killed_again_and_again_has_each_line_once_sqlite(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    await check_kills({}, tiny_model_dir, tmp_path)


@pytest.mark.redis
async def test_a_batch_that_is_killed_again_and_again_has_each_line_once_redis(
    tiny_model_dir: Path, tmp_path: Path, redis_single: Topology
) -> None:
    await check_kills({"STORE": redis_single.url_with(prefix=own_prefix())}, tiny_model_dir, tmp_path)


async def check_kills(store: dict[str, object], model: Path, data_dir: Path) -> None:
    engine = {"MODEL": model, "NUM_THREADS": 1, "EXECUTOR": "eager", "MAX_SLOTS": MAX_SLOTS}
    settings: dict[str, object] = {**engine, "LEASE_S": 1, **store}
    batch_id, num_completed, num_kills = "", 0, 0
    for number in range(NUM_KILLS):
        async with running(settings, data_dir) as server:
            with slow_steps(after=NUM_STEPS):
                batch_id = batch_id or await begin(server)
                batch = await wait_for(server, batch_id, num_completed=num_completed + 1)
                assert batch["request_counts"]["completed"] >= num_completed or batch["status"] == "completed"
                num_completed = batch["request_counts"]["completed"]
                num_kills += batch["status"] != "completed"
                server.process.kill()
                assert await server.process.wait() == -9
        if number == 0:
            assert num_kills == 1  # it was not done before the first kill
    async with running(settings, data_dir) as server:
        batch = await wait_for(server, batch_id, num_completed=NUM_LINES + 1)
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        raw = (await server.client.get(f"/v1/files/{batch['output_file_id']}/content")).content
        output = lines_of(raw)
        for number, body in enumerate(BODIES):
            live = (await server.client.post("/v1/completions", json=body)).json()
            assert output[f"line-{number}"]["response"]["body"]["choices"] == live["choices"]
        files = (await server.client.get("/v1/files")).json()["data"]
        assert sorted(file["purpose"] for file in files) == ["batch", "batch_output"]
