"""/v1/batches: create, list, get, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.batches.batch import new_batch
from service.batches.library import BatchLibrary
from service.deps import ServicesDep, TenantDep
from service.routes.pages import AfterQuery, page_response
from service.schemas.answers import BatchAnswer, BatchPage
from service.schemas.batches import CreateBatchBody
from service.web.errors import shown
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

MAX_PAGE = 100

router = APIRouter(route_class=JsonRoute, tags=["batches"], responses=ERROR_RESPONSES)


@router.post("/v1/batches", summary="Create a batch", response_class=Response, responses=answers(BatchAnswer))
async def create_batch(body: CreateBatchBody, services: ServicesDep, tenant: TenantDep) -> Response:
    """Runs the requests of a file beside live ones, which come first. It goes on after a restart.

    The file is checked when the batch begins: one wrong line makes it `failed`, and nothing is run.
    """
    file = await services.files.get(tenant, body.input_file_id, param="input_file_id")
    if file.purpose != "batch":
        message = f'input_file_id must be a file with the purpose "batch", this one has {shown(file.purpose)}'
        raise InvalidRequest(message, param="input_file_id")
    expires = body.output_expires_after
    batch = new_batch(
        tenant,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_ttl_s=None if expires is None else expires.seconds,
    )
    added = await BatchLibrary(services.records).add(batch)
    services.batch_news.set()
    return json_response(added.fields)


@router.get("/v1/batches", summary="List batches", response_class=Response, responses=answers(BatchPage))
async def list_batches(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: AfterQuery = None,
) -> Response:
    """The newest first."""
    found = await BatchLibrary(services.records).list_all(tenant)
    return page_response([batch.fields for batch in found], limit=limit, after=after, kind="batch")


@router.get("/v1/batches/{batch_id}", summary="Get a batch", response_class=Response, responses=answers(BatchAnswer))
async def get_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """How far it is; `request_counts` is behind by a few seconds while it runs."""
    return json_response((await BatchLibrary(services.records).get(tenant, batch_id)).fields)


@router.post(
    "/v1/batches/{batch_id}/cancel", summary="Cancel a batch", response_class=Response, responses=answers(BatchAnswer)
)
async def cancel_batch(batch_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """It becomes `cancelled` within seconds; what was answered by then is in the output file. 400 once it has ended."""
    changed = await BatchLibrary(services.records).cancel(tenant, batch_id)
    services.batch_news.set()
    return json_response(changed.fields)
