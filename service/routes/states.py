"""/v1/sessions/{id}/states: what a session's states are doing."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from nsm_core.inspection.report import MAX_RECENT_TOKENS
from nsm_core.state.report import Detail
from service.deps import ServicesDep
from service.routes.sessions import SessionKeyDep
from service.schemas.answers import StatesAnswer
from service.state.describe import describe_states
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

router = APIRouter(route_class=JsonRoute, tags=["sessions"], responses=ERROR_RESPONSES)


@router.get(
    "/v1/sessions/{session_id}/states",
    summary="Describe a session's states",
    response_class=Response,
    responses=answers(StatesAnswer),
)
async def get_states(
    key: SessionKeyDep,
    services: ServicesDep,
    detail: Annotated[Detail, Query(description="slot needs `layer`")] = Detail.LAYER,
    layer: Annotated[int | None, Query(ge=0, description="only this layer")] = None,
    recent: Annotated[
        int,
        Query(
            ge=0, le=MAX_RECENT_TOKENS, description="read so many of the last tokens again, and report their routing"
        ),
    ] = 0,
    tokens: Annotated[bool, Query(description="with `recent`: the routing of each of these tokens")] = False,
) -> Response:
    """How far each memory slot has moved from its learned start, and how full attention windows are.

    Read from the newest commit; a running turn is not part of it, and without `recent` the model computes nothing.
    """
    services = await services.for_session(key)
    return json_response(
        await describe_states(
            services.backend,
            services.store,
            services.turns.keeper,
            key,
            detail=detail,
            layer=layer,
            num_recent=recent,
            has_tokens=tokens,
            timeout_s=services.settings.request_timeout_s,
        )
    )
