"""/v1/fine_tuning/jobs: jobs, their events and checkpoints. What a job makes is a named state."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from nsm_core.errors import Forbidden, InvalidRequest
from service.deps import Services, ServicesDep, TenantDep
from service.routes.pages import AfterQuery, page_response
from service.schemas.answers import JobAnswer, JobCheckpointPage, JobEventPage, JobPage
from service.schemas.fine_tuning import DEFAULT_NAME, MAX_SEED, CreateJobBody
from service.tuning.job import AUTO_BATCH, AUTO_EPOCHS, Job, new_job
from service.tuning.library import JobLibrary
from service.web.errors import shown
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

MAX_PAGE = 100
LimitQuery = Annotated[int, Query(ge=1, le=MAX_PAGE)]

router = APIRouter(route_class=JsonRoute, tags=["fine-tuning"], responses=ERROR_RESPONSES)


@router.post(
    "/v1/fine_tuning/jobs", summary="Create a fine-tuning job", response_class=Response, responses=answers(JobAnswer)
)
async def create_job(body: CreateJobBody, services: ServicesDep, tenant: TenantDep) -> Response:
    """Trains a start state on a file of examples; the model stays as it is. The state gets the name in `suffix`.

    The files are checked when the job runs: a fault makes it `failed`, and `error` names line and field.
    """
    if not services.settings.fine_tuning_jobs:
        raise Forbidden(
            "this server takes no fine-tuning jobs: its operator can allow them with NSM_FINE_TUNING_JOBS",
            code="fine_tuning_off",
        )
    services = await services.for_model(body.model)
    name = body.suffix or DEFAULT_NAME
    await services.states.require_own_name(tenant, name)
    await services.tenants.check_stored_bytes(tenant, num_new_bytes=services.backend.model.state_bytes)
    for param in ("training_file", "validation_file"):
        await _require_file(services, tenant, getattr(body, param), param)
    wanted = body.wanted
    job = new_job(
        tenant,
        model=services.model_name,
        training_file=body.training_file,
        validation_file=body.validation_file,
        hyperparameters={
            "n_epochs": wanted.n_epochs or AUTO_EPOCHS,
            "batch_size": wanted.batch_size or AUTO_BATCH,
            "learning_rate_multiplier": wanted.learning_rate_multiplier or 1.0,
        },
        seed=secrets.randbelow(MAX_SEED) if body.seed is None else body.seed,
        name=name,
        metadata=body.metadata,
    )
    added = await JobLibrary(services.records).add(job)
    services.tuning_news.set()
    return json_response(added.fields)


async def _require_file(services: Services, tenant: str, file_id: str | None, param: str) -> None:
    if file_id is None:
        return
    file = await services.files.get(tenant, file_id, param=param)
    if file.purpose != "fine-tune":
        message = f'{param} must be a file with the purpose "fine-tune", this one has {shown(file.purpose)}'
        raise InvalidRequest(message, param=param)


@router.get(
    "/v1/fine_tuning/jobs", summary="List fine-tuning jobs", response_class=Response, responses=answers(JobPage)
)
async def list_jobs(
    services: ServicesDep, tenant: TenantDep, limit: LimitQuery = 20, after: AfterQuery = None
) -> Response:
    """The newest first."""
    jobs = await JobLibrary(services.records).list_all(tenant)
    return page_response([job.fields for job in jobs], limit=limit, after=after, kind="job")


@router.get(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}",
    summary="Get a fine-tuning job",
    response_class=Response,
    responses=answers(JobAnswer),
)
async def get_job(fine_tuning_job_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """How far it is. `fine_tuned_model` is a name for the field `model` of requests once it has succeeded."""
    return json_response((await JobLibrary(services.records).get(tenant, fine_tuning_job_id)).fields)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/cancel",
    summary="Cancel a fine-tuning job",
    response_class=Response,
    responses=answers(JobAnswer),
)
async def cancel_job(fine_tuning_job_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """It is `cancelled` at once, and its process ends within seconds. 400 once it has ended in another way."""

    def end(job: Job) -> Job:
        return job.ended("cancelled").with_event("the job was cancelled")

    return await _changed(services, tenant, fine_tuning_job_id, "cancelled", end)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/pause",
    summary="Pause a fine-tuning job",
    response_class=Response,
    responses=answers(JobAnswer),
)
async def pause_job(fine_tuning_job_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """It is `paused` at once, and its process ends within seconds. Its checkpoint stays. 400 once it has ended."""

    return await _changed(services, tenant, fine_tuning_job_id, "paused", Job.paused)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/resume",
    summary="Resume a fine-tuning job",
    response_class=Response,
    responses=answers(JobAnswer),
)
async def resume_job(fine_tuning_job_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """A paused job is `queued` again and goes on from its checkpoint. Any other is left as it is. 400 once it has
    ended.
    """

    def resume(job: Job) -> Job | None:
        return job.resumed() if job.is_paused else None

    return await _changed(services, tenant, fine_tuning_job_id, "resumed", resume)


async def _changed(
    services: Services, tenant: str, job_id: str, wanted: str, change: Callable[[Job], Job | None]
) -> Response:
    """The job after `change`, of which None leaves it as it is, as one in the status `wanted` is left. Raises
    InvalidRequest for a job that has ended in another way.
    """

    def checked(job: Job) -> Job | None:
        if job.status == wanted:
            return None
        if job.has_ended:
            message = f"fine-tuning job {job.id!r} has {job.status}: it cannot be {wanted}"
            raise InvalidRequest(message, param="fine_tuning_job_id")
        return change(job)

    changed = await JobLibrary(services.records).change(tenant, job_id, checked)
    services.tuning_news.set()
    return json_response(changed.fields)


@router.get(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/events",
    summary="List the events of a fine-tuning job",
    response_class=Response,
    responses=answers(JobEventPage),
)
async def list_events(
    fine_tuning_job_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    limit: LimitQuery = 20,
    after: AfterQuery = None,
) -> Response:
    """The newest first. Those of the type `metrics` have the losses in `data`."""
    job = await JobLibrary(services.records).get(tenant, fine_tuning_job_id)
    return page_response(job.events, limit=limit, after=after, kind="event")


@router.get(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints",
    summary="List the checkpoints of a fine-tuning job",
    response_class=Response,
    responses=answers(JobCheckpointPage),
)
async def list_checkpoints(
    fine_tuning_job_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    limit: LimitQuery = 10,
    after: AfterQuery = None,
) -> Response:
    """One, the state with the lowest held-out loss, once the job has succeeded."""
    job = await JobLibrary(services.records).get(tenant, fine_tuning_job_id)
    found = [_checkpoint(job)] if job.status == "succeeded" else []
    return page_response(found, limit=limit, after=after, kind="checkpoint")


def _checkpoint(job: Job) -> dict[str, Any]:
    reports = {event["data"]["step"]: event["data"] for event in job.events if event["data"] is not None}
    best = reports[reports[max(reports)]["best_step"]]
    return {
        "id": f"ftckpt-{job.id.removeprefix('ftjob-')}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": job.fields["finished_at"],
        "fine_tuned_model_checkpoint": job.fields["fine_tuned_model"],
        "fine_tuning_job_id": job.id,
        "metrics": {"step": best["step"], "train_loss": best["train_loss"], "full_valid_loss": best["valid_loss"]},
        "step_number": best["step"],
    }
