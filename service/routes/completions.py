"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.deps import ArrivalDep, ServicesDep, TenantDep
from service.generate.completions import open_completion
from service.schemas.answers import CompletionAnswer
from service.schemas.completions import CompletionBody
from service.web.json_body import JsonRoute
from service.web.openapi import generation_responses
from service.web.send import send

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post(
    "/v1/completions",
    summary="Continue a text",
    response_class=Response,
    responses=generation_responses(CompletionAnswer),
)
async def create_completion(
    body: CompletionBody, services: ServicesDep, tenant: TenantDep, arrival: ArrivalDep
) -> Response:
    """Continue a text. With `stream: true` the answer is server-sent events, the last of them `[DONE]`."""
    services.log_prompt(arrival, body.prompt)
    completion = await open_completion(services, tenant, body, arrival)
    return await send(completion, is_stream=body.stream, request_id=arrival.request_id)
