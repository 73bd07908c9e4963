"""POST /v1/sessions/{id}/append with a body that comes bit by bit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from nsm_core.errors import Overloaded
from service.deps import ArrivalDep, ServicesDep
from service.generate.session_turn import REPLAYED
from service.live_input.pieces import cutter_of
from service.live_input.reading import LiveReading
from service.routes.sessions import SessionKeyDep, session_object
from service.schemas.sessions import MAX_COUNT
from service.turns.codec import digest_of
from service.web.json_body import json_response
from service.web.live_body import LiveRoute, read_live
from service.web.middleware import CLIENT_LEFT

MAX_OPEN = 256  # bodies of one process

router = APIRouter(route_class=LiveRoute, tags=["sessions"])
_open: set[LiveReading] = set()


@router.post("/v1/sessions/{session_id}/append", include_in_schema=False, response_class=Response)
async def append_live(
    request: Request,
    key: SessionKeyDep,
    services: ServicesDep,
    arrival: ArrivalDep,
    expected_version: Annotated[int | None, Query(ge=0, le=MAX_COUNT)] = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Reads lines {"text": …}, or plain text, as they come; each commit is kept, whatever comes after it."""
    if len(_open) >= MAX_OPEN:
        raise Overloaded(f"{MAX_OPEN} bodies of live input are open, which is the limit")
    kind = request.headers.get("content-type", "")
    cutter = cutter_of(kind)
    services = await services.for_session(key)
    digest = digest_of({"live_input": type(cutter).__name__, "expected_version": expected_version})
    reading = LiveReading(
        services, key, idempotency_key=idempotency_key, expected_version=expected_version, digest=digest
    )
    chunks = read_live(
        request.receive,
        max_bytes=services.settings.max_body_bytes,
        is_stopping=lambda: services.lifecycle.is_draining,
    )
    _open.add(reading)
    try:
        await reading.begin()
        head, done = await reading.read(chunks, cutter, lambda text: services.log_prompt(arrival, text))
    except ClientDisconnect:
        return Response(status_code=CLIENT_LEFT)  # nobody reads it
    finally:
        _open.discard(reading)
    extra = {"mark": done.mark, "num_appended": done.num_tokens, "num_bytes_read": done.num_bytes}
    response = json_response({**session_object(services, head), **extra})
    if reading.is_replay:
        response.headers[REPLAYED] = "true"
    return response
