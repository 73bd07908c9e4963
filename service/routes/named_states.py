"""/v1/states: start states with a name and versions: create, list, get, delete; files."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from service.deps import ArrivalDep, Services, ServicesDep, TenantDep
from service.named_states.create import create_state, naming_field
from service.named_states.reference import Reference, parse_reference
from service.routes.sessions import FILE_RESPONSES, FILE_TYPE, file_body, require_file_type
from service.schemas.answers import DeletedAnswer, NamedStateAnswer, NamedStatePage
from service.schemas.states import CreateStateBody, check_state_name
from service.stores.sessions.key import SessionKey
from service.stores.states.base import PUBLISHED, NamedState
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

router = APIRouter(route_class=JsonRoute, tags=["states"], responses=ERROR_RESPONSES)


async def get_reference(state: Annotated[str, Path(description="name, or name@version")]) -> Reference:
    return parse_reference(state)


ReferenceDep = Annotated[Reference, Depends(get_reference)]


@router.post(
    "/v1/states",
    summary="Create a version of a named state",
    response_class=Response,
    responses=answers(NamedStateAnswer),
)
async def create(body: CreateStateBody, services: ServicesDep, tenant: TenantDep, arrival: ArrivalDep) -> Response:
    """The next version of a name, from a text, messages, a session or a file. It never changes.

    A text is read at once; the answer comes when its state is stored.
    """
    if body.session is None:
        services = await services.for_model(body.model)
    else:
        with naming_field(body):
            services = await services.for_session(SessionKey(tenant, body.session.id), body.model)
    deadline = arrival.time + services.settings.request_timeout_s
    head = await create_state(
        services.states,
        services.store,
        services.turns.keeper,
        services.chat_template,
        tenant,
        body,
        deadline=deadline,
    )
    return json_response(state_object(services, head))


@router.get("/v1/states", summary="List named states", response_class=Response, responses=answers(NamedStatePage))
async def list_states(services: ServicesDep, tenant: TenantDep) -> Response:
    """All versions by name, the newest first: the tenant's own, then those that the operator has published."""
    found = await services.states.list(tenant)
    return json_response({"object": "list", "data": [state_object(services, head) for head in found]})


@router.get(
    "/v1/states/{state}", summary="Get a named state", response_class=Response, responses=answers(NamedStateAnswer)
)
async def get(reference: ReferenceDep, services: ServicesDep, tenant: TenantDep) -> Response:
    """A version of a state; its newest one without a version."""
    return json_response(state_object(services, await services.states.find(tenant, reference, param="state")))


@router.delete(
    "/v1/states/{state}", summary="Delete a named state", response_class=Response, responses=answers(DeletedAnswer)
)
async def delete(reference: ReferenceDep, services: ServicesDep, tenant: TenantDep) -> Response:
    """A version, or all of them. What started from it goes on; its number is not given again."""
    await services.states.delete(tenant, reference)
    return json_response({"id": str(reference), "object": "state.deleted", "deleted": True})


@router.get(
    "/v1/states/{state}/export",
    summary="Export a named state as a file",
    response_class=Response,
    responses=FILE_RESPONSES,
)
async def export(reference: ReferenceDep, services: ServicesDep, tenant: TenantDep) -> Response:
    """The state as a file, with its token log; signed if the server signs."""
    head = await services.states.find(tenant, reference, param="state")
    stored, _ = await services.states.load(head, param="state")
    headers = {"content-disposition": f'attachment; filename="{head.reference}.nsm-state"'}
    return Response(services.states.seal.seal(stored.file), media_type=FILE_TYPE, headers=headers)


@router.post(
    "/v1/states/import",
    summary="Import a named state from a file",
    response_class=Response,
    openapi_extra=file_body("/v1/states/sailor/export"),
    responses=answers(NamedStateAnswer),
)
async def import_file(
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    name: Annotated[str, Query(description="of the new version")],
) -> Response:
    """The next version of a name from a file (the body): of a state, or of a session."""
    require_file_type(request.headers.get("content-type", ""), kind="state")
    file = await services.states.open_file(await request.body())
    services = await services.models.of_fingerprint(file.header.model_fingerprint)
    await services.states.require_usable(file)
    head = await services.states.add(tenant, check_state_name(name), file, source="file", metadata={})
    return json_response(state_object(services, head))


def state_object(services: Services, head: NamedState) -> dict[str, Any]:
    """`model` is null for a state of a model that is not served here."""
    return {
        "id": head.reference,
        "object": "state",
        "name": head.name,
        "version": head.version,
        "published": head.tenant == PUBLISHED,
        "created_at": int(head.created_at),
        "model": services.models.name_of(head.model_fingerprint),
        "model_fingerprint": head.model_fingerprint,
        "position": head.position,
        "num_tokens": head.num_tokens,
        "num_bytes": head.num_bytes,
        "source": head.source,
        "metadata": dict(head.metadata),
    }
