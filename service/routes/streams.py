"""/v1/streams/{id}: the rest of a stream whose connection was lost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.deps import ArrivalDep, ServicesDep, TenantDep
from service.generate.session_turn import open_stream, send_turn
from service.web.errors import shown
from service.web.json_body import JsonRoute
from service.web.openapi import ERROR_RESPONSES, STREAM_RESPONSES

MAX_ID_DIGITS = 18
MAX_NUMBER = 10**MAX_ID_DIGITS - 1  # of a frame

router = APIRouter(route_class=JsonRoute, tags=["sessions"], responses=ERROR_RESPONSES)


@router.get(
    "/v1/streams/{stream_id}",
    summary="Read the rest of a stream",
    response_class=Response,
    responses=STREAM_RESPONSES,
)
async def read_stream(
    stream_id: Annotated[str, Path()],
    services: ServicesDep,
    tenant: TenantDep,
    arrival: ArrivalDep,
    starting_after: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="the number of the last frame received")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="the same, as event sources send it; it wins")] = None,
) -> Response:
    """The frames after `Last-Event-ID`, or else `starting_after`, each once, while the turn runs and after it ended.

    After the last frame there is nothing but the end; a number behind it is an error in the stream. The id is the `id`
    in the stream's frames. Any replica answers; when the one that ran the turn is lost, this one continues it.
    """
    # an event source that lost its connection asks for the same URL, with the header beside it
    after = last_number(last_event_id, of="a frame") if last_event_id else starting_after or 0
    answer = await open_stream(services, tenant, stream_id)
    return await send_turn(answer, is_stream=True, request_id=arrival.request_id, after=after)


def last_number(last_event_id: str, *, of: str) -> int:
    """The number in a `Last-Event-ID`. `of`: what it numbers. Raises InvalidRequest for any other text."""
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= MAX_ID_DIGITS):
        raise InvalidRequest(
            f"Last-Event-ID must be the id of {of} of the stream, got {shown(last_event_id)}", param="Last-Event-ID"
        )
    return int(last_event_id)
