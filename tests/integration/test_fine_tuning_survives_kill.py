"""Server processes that are killed with -9 while they run a fine-tuning job: it goes on from its checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.transfer.session_file import read_file
from tests.support.redis_servers import Topology, own_prefix, wait_until
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps
from tests.support.tuning import pairs

JOBS = "/v1/fine_tuning/jobs"
BODY: dict[str, Any] = {"seed": 1, "suffix": "yes", "hyperparameters": {"n_epochs": 10, "batch_size": 4}}


async def begin(server: Server) -> str:
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", pairs(12))}, "data": {"purpose": "fine-tune"}}
    file = (await server.client.post("/v1/files", **form)).json()
    model = (await server.client.get("/v1/models")).json()["data"][0]["id"]
    answer = await server.client.post(JOBS, json={**BODY, "model": model, "training_file": file["id"]})
    return str(answer.json()["id"])


async def steps_of(server: Server, job_id: str) -> list[int]:
    events = (await server.client.get(f"{JOBS}/{job_id}/events?limit=100")).json()["data"]
    return [event["data"]["step"] for event in reversed(events) if event["type"] == "metrics"]


async def wait_for_step(server: Server, job_id: str, step: int) -> None:
    while True:
        if max(await steps_of(server, job_id), default=0) >= step:
            return
        await asyncio.sleep(0.02)


async def finished(server: Server, job_id: str) -> dict[str, Any]:
    while True:
        job: dict[str, Any] = (await server.client.get(f"{JOBS}/{job_id}")).json()
        if job["finished_at"] is not None:
            return job
        await asyncio.sleep(0.05)


async def numbers_of(server: Server, state: str) -> bytes:
    snapshot = read_file((await server.client.get(f"/v1/states/{state}/export")).content).snapshot
    assert snapshot is not None
    return snapshot.state


async def check_kill(store: dict[str, object], model: Path, data_dir: Path) -> None:
    settings: dict[str, object] = {"MODEL": model, "NUM_THREADS": 1, "LEASE_S": 1, "FINE_TUNING_JOBS": 1, **store}
    async with running(settings, data_dir) as server:
        whole = await finished(server, await begin(server))
        assert whole["status"] == "succeeded", whole
        expected = await numbers_of(server, "yes@1")
        with slow_steps(after=6):
            job_id = await begin(server)
            await wait_for_step(server, job_id, 6)
            children = psutil.Process(server.process.pid).children(recursive=True)
            assert children
            server.process.kill()
            assert await server.process.wait() == -9
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
        assert not alive  # a job's process ends with its server
    async with running(settings, data_dir) as server:
        job = await finished(server, job_id)
        assert job["status"] == "succeeded", job
        assert job["fine_tuned_model"].endswith(":yes@2")
        steps = await steps_of(server, job_id)
        if "STORE" not in store:
            assert steps.count(0) == 1  # it did not begin again
        states = (await server.client.get("/v1/states")).json()["data"]
        assert [state["id"] for state in states] == ["yes@2", "yes@1"]
        assert await numbers_of(server, "yes@2") == expected
        directory = data_dir / "fine-tuning"  # a job's files go just after its end is reported
        await asyncio.to_thread(wait_until, lambda: not list(directory.glob("*")), "the end of the job's files")


async def test_paused_job_stays_so_over_a_kill_and_is_resumed_from_its_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"MODEL": tiny_model_dir, "NUM_THREADS": 1, "LEASE_S": 1, "FINE_TUNING_JOBS": 1}
    async with running(settings, tmp_path) as server:
        assert (await finished(server, await begin(server)))["status"] == "succeeded"
        expected = await numbers_of(server, "yes@1")
        with slow_steps(after=6):
            job_id = await begin(server)
            await wait_for_step(server, job_id, 6)
            paused = (await server.client.post(f"{JOBS}/{job_id}/pause")).json()
        assert paused["status"] == "paused", paused
        server.process.kill()
        assert await server.process.wait() == -9
    async with running(settings, tmp_path) as server:
        assert (await finished(server, await begin(server)))["status"] == "succeeded"  # another has its turn
        assert (await server.client.get(f"{JOBS}/{job_id}")).json()["status"] == "paused"
        assert (await server.client.post(f"{JOBS}/{job_id}/resume")).json()["status"] == "queued"
        job = await finished(server, job_id)
        assert job["fine_tuned_model"].endswith(":yes@3"), job
        assert (await steps_of(server, job_id)).count(0) == 1  # it did not begin again
        assert await numbers_of(server, "yes@3") == expected


async def test_job_of_a_killed_server_goes_on_sqlite(tiny_model_dir: Path, tmp_path: Path) -> None:
    await check_kill({}, tiny_model_dir, tmp_path)


@pytest.mark.redis
async def test_job_of_a_killed_server_goes_on_redis(
    tiny_model_dir: Path, tmp_path: Path, redis_single: Topology
) -> None:
    await check_kill({"STORE": redis_single.url_with(prefix=own_prefix())}, tiny_model_dir, tmp_path)
