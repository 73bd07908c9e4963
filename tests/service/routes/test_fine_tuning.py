"""/v1/fine_tuning/jobs with the stock client: jobs whose processes train a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from nsm_core.config import EngineConfig
from nsm_core.control_group import usable_threads
from nsm_core.errors import NotFound, QuotaExceeded, StoreUnavailable
from service.backends.local import LocalBackend
from service.tuning import run
from service.tuning.job import Job, new_job
from service.tuning.library import MAX_OPEN, JobLibrary
from service.tuning.process import tuning_threads
from service.tuning.run import JobRun, _until_ended
from tests.support.counts import every_second
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway, until
from tests.support.slow_steps import TRAINING, command, slow_steps
from tests.support.tuning import file_of, pairs

ENDED = ("succeeded", "failed", "cancelled")
QUICK: dict[str, Any] = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 1.0}


@pytest.fixture
async def server(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    from nsm_core.architectures import load_model

    monkeypatch.setattr(run, "COMMAND", command(TRAINING))
    backend = LocalBackend(load_model(tiny_model_dir), EngineConfig(max_slots=4, token_budget=32, queue_limit=32))
    async with gateway(backend, is_live=True, model=tiny_model_dir, fine_tuning_jobs=1, data_dir=tmp_path) as made:
        yield made


async def upload(server: Gateway, raw: bytes, purpose: Any = "fine-tune") -> str:
    return (await server.openai.files.create(file=("examples.jsonl", raw), purpose=purpose)).id


async def begin(server: Gateway, raw: bytes | None = None, **fields: Any) -> FineTuningJob:
    body = {"model": server.services.model_name, "seed": 1, "hyperparameters": QUICK, **fields}
    training = await upload(server, pairs(10) if raw is None else raw)
    return await server.openai.fine_tuning.jobs.create(training_file=training, **body)


async def ended(server: Gateway, job: FineTuningJob) -> FineTuningJob:
    while job.status not in ENDED:
        await asyncio.sleep(0.05)
        job = await server.openai.fine_tuning.jobs.retrieve(job.id)
    return job


async def running(server: Gateway, job: FineTuningJob) -> FineTuningJob:
    while job.status != "running":
        assert job.status not in ENDED
        await asyncio.sleep(0.05)
        job = await server.openai.fine_tuning.jobs.retrieve(job.id)
    return job


async def test_job_makes_a_state_that_requests_name_as_their_model(server: Gateway) -> None:
    validation = await upload(server, pairs(3))
    begun = await begin(server, suffix="yes", validation_file=validation, metadata={"a": "b"})
    assert (begun.status, begun.fine_tuned_model, begun.object) == ("queued", None, "fine_tuning.job")
    job = await ended(server, begun)
    assert (job.status, job.error, job.metadata) == ("succeeded", None, {"a": "b"})
    assert job.hyperparameters.to_dict() == QUICK
    assert job.fine_tuned_model == f"ft:{server.services.model_name}:yes@1"
    assert job.trained_tokens is not None
    assert job.trained_tokens > 0
    assert job.finished_at is not None
    answer = await server.openai.completions.create(
        model=job.fine_tuned_model, prompt="Number 3:", max_tokens=4, temperature=0
    )
    named = await server.openai.completions.create(
        model=server.services.model_name,
        prompt="Number 3:",
        max_tokens=4,
        temperature=0,
        extra_body={"state": "yes@1"},
    )
    assert answer.choices == named.choices
    events = [event async for event in server.openai.fine_tuning.jobs.list_events(job.id, limit=3)]
    assert [event.message for event in events[-2:]] == [
        "10 examples, 3 held out, 6 steps",
        "the job waits for its turn",
    ]
    metrics = [event.data for event in events if event.type == "metrics"]
    assert [data["step"] for data in metrics] == [6, 5, 4, 3, 2, 1, 0]  # type: ignore[index]
    assert events[0].message == "the state yes@1 is there"
    (checkpoint,) = [one async for one in server.openai.fine_tuning.jobs.checkpoints.list(job.id)]
    assert checkpoint.fine_tuned_model_checkpoint == job.fine_tuned_model
    best = min(metrics, key=lambda data: data["valid_loss"])  # type: ignore[index]
    assert (checkpoint.step_number, checkpoint.metrics.full_valid_loss) == (best["step"], best["valid_loss"])  # type: ignore[index]
    state = (await server.client.get("/v1/states/yes")).json()
    assert (state["source"], state["metadata"]) == ("tuned", {"fine_tuning_job": job.id})
    await until(lambda: server.metric("nsm_fine_tuning_jobs_total", status="succeeded") == 1)
    assert server.metric("nsm_fine_tuning_jobs_running") == 0


async def test_fault_of_a_file_names_line_and_field(server: Gateway) -> None:
    wrong = file_of({"prompt": "a", "completion": "b"}, {"messages": [{"role": "user", "content": 3}]})
    job = await ended(server, await begin(server, wrong))
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.to_dict() == {
        "code": "invalid_training_file",
        "message": "line 2: messages[0].content must be a string, got 3",
        "param": "training_file",
    }
    other = await ended(server, await begin(server, validation_file=await upload(server, b"\xff\xfe")))
    assert other.error is not None
    assert (other.error.code, other.error.param) == ("invalid_validation_file", "validation_file")
    assert other.error.message.startswith("line 1: it is not UTF-8")
    events = await server.openai.fine_tuning.jobs.list_events(job.id)
    assert (events.data[0].level, events.data[0].message) == ("error", job.error.message)


@pytest.mark.parametrize(
    ("name", "num_failures"),
    [
        pytest.param(name, num_failures, id=f"{name}-{num_failures}")
        for row, name in enumerate(("training.jsonl", "checkpoint.safetensors.partial"))
        for num_failures in (0, 1)
        if every_second(row, num_failures)
    ],
)
async def test_full_disk_fails_the_job(
    server: Gateway, monkeypatch: pytest.MonkeyPatch, name: str, num_failures: int
) -> None:
    """In the gateway, or in the job's process. A store that fails once makes the job begin again, in its directory."""
    prepare, num_tries = JobRun._prepare, 0

    async def prepare_on_full_disk(run: JobRun) -> None:
        nonlocal num_tries
        num_tries += 1
        run.directory.mkdir(parents=True, exist_ok=True)
        if not (run.directory / name).is_symlink():
            (run.directory / name).symlink_to("/dev/full")
        if num_tries <= num_failures:
            raise StoreUnavailable("the store does not answer")
        await prepare(run)

    monkeypatch.setattr(JobRun, "_prepare", prepare_on_full_disk)
    job = await ended(server, await begin(server))
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "storage_full"
    assert "disk is full" in job.error.message
    assert num_tries > num_failures


def test_training_has_a_quarter_of_the_threads_and_at_least_one() -> None:
    assert [tuning_threads(num) for num in (1, 3, 4, 9, 16)] == [1, 1, 1, 2, 4]
    assert tuning_threads(None) == tuning_threads(usable_threads(os.cpu_count() or 1))


async def test_deleted_file_fails_the_job(server: Gateway) -> None:
    with slow_steps():
        first = await begin(server)
        waiting = await begin(server)
        await server.openai.files.delete(waiting.training_file)
        await server.openai.fine_tuning.jobs.cancel(first.id)
    job = await ended(server, waiting)
    assert job.error is not None
    assert (job.error.code, job.error.param) == ("file_not_found", "training_file")


async def test_cancelled_job_ends_at_once_and_leaves_nothing(server: Gateway) -> None:
    with slow_steps():
        job = await running(server, await begin(server, suffix="never"))
        cancelled = await server.openai.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled"
    assert cancelled.finished_at is not None
    next_job = await ended(server, await begin(server))  # its turn comes when the other's process is gone
    assert next_job.status == "succeeded"
    assert (await server.openai.fine_tuning.jobs.retrieve(job.id)).status == "cancelled"
    assert (await server.openai.fine_tuning.jobs.cancel(job.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has succeeded: it cannot be cancelled"):
        await server.openai.fine_tuning.jobs.cancel(next_job.id)
    assert (await server.client.get("/v1/states/never")).status_code == 404
    assert [one.id async for one in server.openai.fine_tuning.jobs.list(limit=1)] == [next_job.id, job.id]


async def test_paused_job_lets_others_run_and_goes_on_when_it_is_resumed(server: Gateway) -> None:
    jobs = server.openai.fine_tuning.jobs
    whole = await ended(server, await begin(server, suffix="whole"))
    with slow_steps():
        held, other = await begin(server, suffix="held"), await begin(server, suffix="other")
        assert (await jobs.pause(held.id)).status == "paused"
    assert (await jobs.pause(held.id)).status == "paused"  # a retry
    assert (await ended(server, other)).status == "succeeded"
    assert (await jobs.retrieve(held.id)).status == "paused"
    resumed = await jobs.resume(held.id)
    assert resumed.status == "queued"
    done = await ended(server, held)
    assert (done.status, done.trained_tokens) == ("succeeded", whole.trained_tokens)
    messages = [event.message async for event in jobs.list_events(held.id)]
    assert messages.count("the job was paused") == 1
    assert "the job was resumed and waits for its turn" in messages
    for act in (jobs.pause, jobs.resume):
        with pytest.raises(openai.BadRequestError, match="has succeeded: it cannot be"):
            await act(held.id)
    with pytest.raises(openai.NotFoundError):
        await jobs.pause("ftjob-none")


async def test_pause_ends_the_process_of_a_running_job(server: Gateway) -> None:
    with slow_steps():
        job = await running(server, await begin(server))
        assert (await server.openai.fine_tuning.jobs.pause(job.id)).status == "paused"
    await until(lambda: server.metric("nsm_fine_tuning_jobs_running") == 0)
    assert (await server.openai.fine_tuning.jobs.retrieve(job.id)).status == "paused"
    assert (await server.openai.fine_tuning.jobs.cancel(job.id)).status == "cancelled"
    await until(lambda: server.metric("nsm_fine_tuning_jobs_total", status="cancelled") == 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "no good"}, "suffix"),
        ({"suffix": "x" * 65}, "suffix"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"batch_size": 257}}, "hyperparameters.batch_size"),
        ({"hyperparameters": {"learning_rate_multiplier": -1.0}}, "hyperparameters.learning_rate_multiplier"),
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"method": {"type": "supervised"}}, "hyperparameters"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"seed": -1}, "seed"),
        ({"unknown": 1}, "unknown"),
        ({"model": "other"}, "model"),
        ({"validation_file": "file-none"}, "validation_file"),
    ],
)
async def test_body_that_cannot_be_names_its_field(fields: dict[str, Any], param: str, tmp_path: Path) -> None:
    async with gateway(FakeBackend(), is_live=True, fine_tuning_jobs=1, data_dir=tmp_path) as server:
        body = {"model": server.services.model_name, "training_file": await upload(server, pairs(2))}
        body |= {"hyperparameters": QUICK, **fields}
        refused = await server.client.post("/v1/fine_tuning/jobs", json=body)
        assert refused.status_code in (400, 404)
        assert error_of(refused)["param"] == param


async def test_file_of_another_purpose_is_refused(tmp_path: Path) -> None:
    async with gateway(FakeBackend(), is_live=True, fine_tuning_jobs=1, data_dir=tmp_path) as server:
        file = await upload(server, pairs(2), purpose="batch")
        with pytest.raises(openai.BadRequestError, match='must be a file with the purpose "fine-tune"'):
            await server.openai.fine_tuning.jobs.create(model=server.services.model_name, training_file=file)


async def test_server_takes_no_jobs_by_default() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        with pytest.raises(openai.PermissionDeniedError, match="NSM_FINE_TUNING_JOBS"):
            await begin(server)
        assert (await server.openai.fine_tuning.jobs.list()).data == []


async def test_tenant_has_a_bounded_number_of_open_jobs_and_sees_its_own() -> None:
    async with gateway(FakeBackend()) as server:
        library = JobLibrary(server.services.records)

        def job_of(tenant: str) -> Job:
            return new_job(
                tenant,
                model="m",
                training_file="file-a",
                validation_file=None,
                hyperparameters=QUICK,
                seed=1,
                name="x",
                metadata={},
            )

        jobs = [await library.add(job_of("acme")) for _ in range(MAX_OPEN)]
        with pytest.raises(QuotaExceeded, match="8 fine-tuning jobs that have not ended"):
            await library.add(job_of("acme"))
        await library.add(job_of("rival"))
        await library.change("acme", jobs[0].id, lambda job: job.ended("cancelled"))
        assert [one.id for one in await library.list_all("acme")] == [one.id for one in jobs]
        await library.add(job_of("acme"))
        with pytest.raises(NotFound, match="does not exist"):
            await library.get("rival", jobs[0].id)


async def test_a_job_that_is_cancelled_twice_still_waits_for_its_process() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=pipe)
    ending = asyncio.create_task(_until_ended(process))
    for _ in range(2):
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.sleep(0)
    assert not ending.done()
    process.kill()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL
