"""GET /health/live, /health/ready and its alias /health."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.responses import Response

from nsm_core.errors import NsmError
from service.deps import Services, ServicesDep
from service.schemas.answers import LiveAnswer, ReadyAnswer
from service.web.json_body import json_response
from service.web.openapi import answers

logger = logging.getLogger("nsm.health")

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
    fault = await store_fault(services)
    checks = {
        "engine": services.backend.is_ready(),
        "store": fault is None,
        "accepting": not services.lifecycle.is_draining,
    }
    is_ready = all(checks.values())
    status = "ready" if is_ready else "not ready"
    reasons = {} if fault is None else {"reasons": {"store": fault}}
    body = {"status": status, "checks": checks, **reasons, "replica": services.turns.replica}
    return json_response(body, 200 if is_ready else 503)


async def store_fault(services: Services) -> str | None:
    """Why the store cannot be written, for a client; the log has the operator's notes too. None: it can."""
    try:
        async with asyncio.timeout(STORE_PROBE_TIMEOUT_S):
            await services.store.check_writable()
    except NsmError as error:
        logger.warning("not ready: %s", error.with_notes())
        return str(error)
    except TimeoutError:
        fault = f"the session store did not answer within {STORE_PROBE_TIMEOUT_S:g} s"
        logger.warning("not ready: %s", fault)
        return fault
    return None
