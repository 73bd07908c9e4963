"""/v1/responses: create, read, stream, cancel, delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query
from starlette.responses import Response

from nsm_core.errors import InvalidRequest, NotFound
from service.deps import ArrivalDep, ScopeDep
from service.generate.session_turn import IDEMPOTENCY_KEY
from service.messages import quoted
from service.responses.answers import ReadAnswer, ResponseAnswer
from service.responses.create import count_input_tokens, open_response
from service.responses.format import frames
from service.responses.records import load_response
from service.responses.removal import cancel_response, delete_response
from service.responses.running import refresh_status
from service.routes.streams import MAX_NUMBER, last_number
from service.schemas.answers import DeletedAnswer, InputTokens, ItemPage, ResponseObject
from service.schemas.items import list_object, page_of
from service.schemas.responses import CountTokensBody, CreateResponseBody
from service.web.errors import shown
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers, generation_responses
from service.web.sse import EventStream

MAX_PAGE = 100

router = APIRouter(route_class=JsonRoute, tags=["responses"], responses=ERROR_RESPONSES)

ResponseId = Annotated[str, Path()]


@router.post(
    "/v1/responses",
    summary="Create a response",
    response_class=Response,
    responses=generation_responses(ResponseObject),
)
async def create_response(
    body: CreateResponseBody,
    scope: ScopeDep,
    arrival: ArrivalDep,
    idempotency_key: Annotated[
        str | None, Header(description="a retry with the same key gets the same response")
    ] = None,
) -> Response:
    """Read the input after what `previous_response_id` or `conversation` stands for, and answer.

    Unless `store` is false the response is kept: the next one may continue it, and its stream may be read again. Of
    two that continue the same one the second is a fork.
    """
    scope.services.log_prompt(arrival, body.model_dump(include={"input", "instructions"}))
    answer = await open_response(scope, body, arrival, key=_checked_key(idempotency_key))
    return await _send(answer, is_stream=body.stream, request_id=arrival.request_id)


@router.post(
    "/v1/responses/input_tokens",
    summary="Count the tokens of a response's input",
    response_class=Response,
    responses=answers(InputTokens),
)
async def count_tokens(body: CountTokensBody, scope: ScopeDep) -> Response:
    """How many tokens a response with this input would stand on."""
    num_tokens = await count_input_tokens(scope, body)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.get(
    "/v1/responses/{response_id}",
    summary="Get a response, or its events",
    response_class=Response,
    responses=generation_responses(ResponseObject),
)
async def get_response(
    response_id: ResponseId,
    scope: ScopeDep,
    arrival: ArrivalDep,
    stream: Annotated[bool, Query(description="its events, also while it runs")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="the sequence_number of the last event received")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="the same, as event sources send it; it wins")] = None,
) -> Response:
    """As it is now; with `stream` its events after `Last-Event-ID`, or `starting_after`, each once, on any replica.

    After the last event there is nothing; a number behind it is an error in the stream.
    """
    stored = await load_response(scope, response_id)
    if not stream:
        return json_response((await refresh_status(scope, stored)).response)
    # an event source that lost its connection asks for the same URL, with the header beside it
    after = (
        last_number(last_event_id, of="an event") if last_event_id else -1 if starting_after is None else starting_after
    )
    answer = ReadAnswer(scope, stored)
    return await _send(answer, is_stream=True, request_id=arrival.request_id, starting_after=after)


@router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response",
    response_class=Response,
    responses=answers(DeletedAnswer),
)
async def remove_response(response_id: ResponseId, scope: ScopeDep) -> Response:
    """Stops it if it runs. The session behind it goes with the last response that needs it."""
    await delete_response(scope, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response",
    response_class=Response,
    responses=answers(ResponseObject),
)
async def cancel(response_id: ResponseId, scope: ScopeDep) -> Response:
    """Stops it, wherever it runs; the response as it ended. One that has ended stays as it is."""
    return json_response((await cancel_response(scope, response_id)).response)


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the items that a response was given",
    response_class=Response,
    responses=answers(ItemPage),
)
async def list_input_items(
    response_id: ResponseId,
    scope: ScopeDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="the last item of the page before")] = None,
) -> Response:
    """The items that this response was given; not those of the responses before it."""
    stored = await load_response(scope, response_id)
    items: dict[str, dict[str, Any]] = {item["id"]: item for item in stored.input}
    page = page_of(list(items), limit=limit, order=order, after=after)
    if page is None:
        raise NotFound(f"item {quoted(after or '')} is not one of this response's input", param="after")
    ids, has_more = page
    return json_response(list_object([items[item_id] for item_id in ids], has_more=has_more))


async def _send(answer: ResponseAnswer, *, is_stream: bool, request_id: str, starting_after: int = -1) -> Response:
    """However it ends, also when the client leaves (this task is then cancelled), the answer is left at last."""
    if is_stream:
        events = frames(answer.batches(), request_id=request_id, starting_after=starting_after)
        return EventStream(events, on_close=answer.leave)
    try:
        return json_response(await answer.collect())
    finally:
        answer.leave()


def _checked_key(key: str | None) -> str | None:
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to 255 printable ASCII characters without spaces, got {shown(key)}",
            param="Idempotency-Key",
        )
    return key
