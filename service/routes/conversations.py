"""/v1/conversations: lists of items that responses read and add to."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from service.deps import ScopeDep
from service.responses.conversations import (
    add_items,
    create_conversation,
    delete_conversation,
    delete_item,
    item_not_found,
    load_conversation,
    read_items,
    set_metadata,
)
from service.schemas.answers import ConversationAnswer, DeletedAnswer, ItemAnswer, ItemPage
from service.schemas.conversations import CreateConversationBody, ItemsBody, UpdateConversationBody
from service.schemas.items import list_object, page_of
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

MAX_PAGE = 100

router = APIRouter(route_class=JsonRoute, tags=["conversations"], responses=ERROR_RESPONSES)

ConversationId = Annotated[str, Path()]
ItemId = Annotated[str, Path()]


@router.post(
    "/v1/conversations",
    summary="Create a conversation",
    response_class=Response,
    responses=answers(ConversationAnswer),
)
async def create(scope: ScopeDep, body: CreateConversationBody | None = None) -> Response:
    """A conversation, empty or with items that its first response will read. The body may be left out."""
    body = body or CreateConversationBody()
    conversation = await create_conversation(scope, items=body.to_items(), metadata=body.metadata)
    return json_response(conversation.to_object())


@router.get(
    "/v1/conversations/{conversation_id}",
    summary="Get a conversation",
    response_class=Response,
    responses=answers(ConversationAnswer),
)
async def get_conversation(conversation_id: ConversationId, scope: ScopeDep) -> Response:
    return json_response((await load_conversation(scope, conversation_id)).to_object())


@router.post(
    "/v1/conversations/{conversation_id}",
    summary="Change a conversation's metadata",
    response_class=Response,
    responses=answers(ConversationAnswer),
)
async def update_conversation(
    conversation_id: ConversationId, body: UpdateConversationBody, scope: ScopeDep
) -> Response:
    """New metadata, as a whole."""
    return json_response((await set_metadata(scope, conversation_id, body.metadata)).to_object())


@router.delete(
    "/v1/conversations/{conversation_id}",
    summary="Delete a conversation",
    response_class=Response,
    responses=answers(DeletedAnswer),
)
async def remove_conversation(conversation_id: ConversationId, scope: ScopeDep) -> Response:
    """The conversation, its items and, when no response needs it, its session. Its responses stay."""
    await delete_conversation(scope, conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(
    "/v1/conversations/{conversation_id}/items",
    summary="Add items to a conversation",
    response_class=Response,
    responses=answers(ItemPage),
)
async def create_items(conversation_id: ConversationId, body: ItemsBody, scope: ScopeDep) -> Response:
    """Adds items at the end: the next response reads them first."""
    items = body.to_items()
    await add_items(scope, conversation_id, items)
    return json_response(list_object(items, has_more=False))


@router.get(
    "/v1/conversations/{conversation_id}/items",
    summary="List a conversation's items",
    response_class=Response,
    responses=answers(ItemPage),
)
async def list_items(
    conversation_id: ConversationId,
    scope: ScopeDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="the last item of the page before")] = None,
) -> Response:
    """In the order in which they were, or will be, read."""
    conversation = await load_conversation(scope, conversation_id)
    page = page_of(conversation.item_ids, limit=limit, order=order, after=after)
    if page is None:
        raise item_not_found(after or "", param="after")
    ids, has_more = page
    return json_response(list_object(await read_items(scope, conversation_id, ids), has_more=has_more))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Get an item",
    response_class=Response,
    responses=answers(ItemAnswer),
)
async def get_item(conversation_id: ConversationId, item_id: ItemId, scope: ScopeDep) -> Response:
    conversation = await load_conversation(scope, conversation_id)
    found = await read_items(scope, conversation_id, [item_id] if item_id in conversation.item_ids else [])
    if not found:
        raise item_not_found(item_id)
    return json_response(found[0])


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Delete an item",
    response_class=Response,
    responses=answers(ConversationAnswer),
)
async def remove_item(conversation_id: ConversationId, item_id: ItemId, scope: ScopeDep) -> Response:
    """The conversation without it. If a response has read it, the next one reads all that is left again."""
    return json_response((await delete_item(scope, conversation_id, item_id)).to_object())
