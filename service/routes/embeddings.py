"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.deps import ArrivalDep, ServicesDep, TenantDep
from service.generate.embeddings import open_embeddings
from service.schemas.answers import EmbeddingsAnswer
from service.schemas.embeddings import EmbeddingsBody
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

router = APIRouter(route_class=JsonRoute, tags=["embeddings"], responses=ERROR_RESPONSES)


@router.post("/v1/embeddings", summary="Vectors of texts", response_class=Response, responses=answers(EmbeddingsAnswer))
async def create_embeddings(
    body: EmbeddingsBody, services: ServicesDep, tenant: TenantDep, arrival: ArrivalDep
) -> Response:
    """The state after each text, as a short vector. Nothing of it is trained: see docs/embeddings.md."""
    services.log_prompt(arrival, body.input)
    embeddings = await open_embeddings(services, tenant, body, arrival)
    return json_response(await embeddings.collect())
