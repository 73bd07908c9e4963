"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from service.deps import ServicesDep

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response)
async def metrics(services: ServicesDep) -> Response:
    """Prometheus's text format."""
    return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
