"""GET /health/live, /health/ready and its alias /health."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from nsm_core.errors import NsmError
from service.deps import Services, ServicesDep
from service.schemas.answers import LiveAnswer, ReadyAnswer
from service.web.json_body import json_response
from service.web.openapi import answers

STORE_PROBE_TIMEOUT_S = 2.0

READINESS = {**answers(ReadyAnswer), **answers(ReadyAnswer, status=503)}

router = APIRouter(tags=["health"])


@router.get(
    "/health/live",
    summary="Is the process alive?",
    response_class=Response,
    responses=answers(LiveAnswer),
)
async def live() -> Response:
    """The process answers; nothing else is asked."""
    return json_response({"status": "live"})


@router.get(
    "/health",
    summary="Is the server ready for work?",
    response_class=Response,
    responses=READINESS,
)
@router.get(
    "/health/ready",
    summary="Is the server ready for work?",
    response_class=Response,
    responses=READINESS,
)
async def ready(services: ServicesDep) -> Response:
    """New work is welcome: the engine's loop is alive, the store takes writes, and the server is not stopping."""
    checks = {
        "engine": services.backend.is_ready(),
        "store": await is_writable(services),
        "accepting": not services.lifecycle.is_draining,
    }
    is_ready = all(checks.values())
    status = "ready" if is_ready else "not ready"
    body = {"status": status, "checks": checks, "replica": services.turns.replica}
    return json_response(body, 200 if is_ready else 503)


async def is_writable(services: Services) -> bool:
    """A store that does not answer in time counts as one that cannot be written."""
    try:
        async with asyncio.timeout(STORE_PROBE_TIMEOUT_S):
            await services.store.check_writable()
    except (NsmError, TimeoutError):
        return False
    return True
