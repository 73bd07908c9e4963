"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.deps import ArrivalDep, ServicesDep, TenantDep
from service.generate.chat import open_chat
from service.schemas.answers import ChatAnswer
from service.schemas.chat import ChatBody
from service.web.json_body import JsonRoute
from service.web.openapi import generation_responses
from service.web.send import send

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a chat",
    response_class=Response,
    responses=generation_responses(ChatAnswer),
)
async def create_chat_completion(
    body: ChatBody, services: ServicesDep, tenant: TenantDep, arrival: ArrivalDep
) -> Response:
    """Answer the last message. With `stream: true` the answer is server-sent events, the last of them `[DONE]`."""
    services.log_prompt(arrival, [message.model_dump() for message in body.messages])
    chat = await open_chat(services, tenant, body, arrival)
    return await send(chat, is_stream=body.stream, request_id=arrival.request_id)
