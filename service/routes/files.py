"""/v1/files: upload, list, get, read, delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.deps import ServicesDep, TenantDep
from service.files.multipart import FormPart, read_form
from service.files.stored_files import PURPOSES
from service.routes.pages import AfterQuery, page_response
from service.routes.sessions import FILE_RESPONSES, FILE_TYPE
from service.schemas.answers import DeletedAnswer, FileAnswer, FilePage
from service.schemas.batches import read_ttl
from service.web.errors import shown
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

MAX_PAGE = 10_000  # OpenAI's
FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 16}}'
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(PURPOSES)},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                },
                "example": {"file": LINE, "purpose": "batch"},
            }
        },
    }
}

router = APIRouter(route_class=JsonRoute, tags=["files"], responses=ERROR_RESPONSES)


@router.post(
    "/v1/files",
    summary="Upload a file",
    response_class=Response,
    openapi_extra=FORM,
    responses=answers(FileAnswer),
)
async def upload(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """A form with `file` and `purpose`; the whole body has at most `NSM_MAX_FILE_BYTES`."""
    form = read_form(request.headers.get("content-type", ""), await request.body())
    for name in form:
        if name not in FIELDS:
            raise InvalidRequest(f"unknown field {shown(name)} in the form", param=name, code="unknown_parameter")
    file, purpose = _required(form, "file"), _required(form, "purpose").text
    if purpose not in PURPOSES:
        message = f"purpose must be one of {', '.join(PURPOSES)}, got {shown(purpose)}"
        raise InvalidRequest(message, param="purpose")
    anchor, seconds = (form[name].text if name in form else None for name in FIELDS[2:])
    ttl_s = read_ttl(anchor, seconds)
    name = (file.filename or "file")[:255]
    made = await services.files.create(tenant, file.raw, filename=name, purpose=purpose, ttl_s=ttl_s)
    return json_response(made.to_object())


def _required(form: dict[str, FormPart], name: str) -> FormPart:
    if name not in form:
        raise InvalidRequest(f"{name} is required in the form", param=name)
    return form[name]


@router.get("/v1/files", summary="List files", response_class=Response, responses=answers(FilePage))
async def list_files(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    after: AfterQuery = None,
    purpose: Annotated[str | None, Query(description="only files with this purpose")] = None,
) -> Response:
    """By creation, the newest first unless `order` is `asc`."""
    found = [file.to_object() for file in await services.files.list(tenant) if purpose in (None, file.purpose)]
    return page_response(found, limit=limit, after=after, kind="file", order=order)


@router.get("/v1/files/{file_id}", summary="Get a file", response_class=Response, responses=answers(FileAnswer))
async def get_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """Name, purpose and size; `status` is `uploaded` for an upload that was cut off."""
    return json_response((await services.files.get(tenant, file_id)).to_object())


@router.get("/v1/files/{file_id}/content", summary="Read a file", response_class=Response, responses=FILE_RESPONSES)
async def read_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """Its bytes."""
    raw = await services.files.read(tenant, await services.files.get(tenant, file_id))
    return Response(raw, media_type=FILE_TYPE)


@router.delete(
    "/v1/files/{file_id}", summary="Delete a file", response_class=Response, responses=answers(DeletedAnswer)
)
async def delete_file(file_id: str, services: ServicesDep, tenant: TenantDep) -> Response:
    """It is gone when this answers. A batch that still has to read it fails."""
    await services.files.delete(tenant, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
