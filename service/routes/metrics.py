"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.deps import ServicesDep
from service.web.openapi import ERROR_RESPONSES

METRICS = {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={200: METRICS, **ERROR_RESPONSES},
)
async def metrics(services: ServicesDep) -> Response:
    """Prometheus's text format."""
    return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
