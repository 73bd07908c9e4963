"""POST /v1/responses as a use case: items -> a turn on the session of their chain -> a response object, or events."""

from __future__ import annotations

import dataclasses
import time
import uuid

from nsm_core.errors import InvalidRequest, KeyReused, NotFound, SessionBusy, StateMismatch, VersionConflict
from nsm_core.hashing import identity_of
from service.deps import Arrival, TenantScope
from service.generate.structured import with_grammar
from service.messages import quoted
from service.responses.answers import ReadAnswer, ResponseAnswer, StoredAnswer, UnstoredResponse
from service.responses.chain import Chain, TurnPlan, plan_first_turn, plan_turn
from service.responses.conversations import Conversation, finish_turn, forget_turn, load_conversation, read_items
from service.responses.format import Response, opened_response
from service.responses.opening import Opening
from service.responses.records import Draft, StoredResponse, find_response, load_response
from service.responses.running import refresh_status, save_when_ended
from service.responses.unstored import open_unstored
from service.schemas.items import Item
from service.schemas.responses import ContextFields, CreateResponseBody
from service.turns.codec import digest_of

GIVEN_UP = ("failed", "cancelled")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a response stands on before its own input.

    `unread`: items of its conversation that the chain has not read. `is_shared`: the chain's session is not this
    response's to go on with.
    """

    chain: Chain | None = None
    unread: tuple[Item, ...] = ()
    conversation: Conversation | None = None
    is_shared: bool = False


async def open_response(
    scope: TenantScope, body: CreateResponseBody, arrival: Arrival, *, key: str | None = None
) -> ResponseAnswer:
    """Checks everything and begins; raises what the client shall get as a status.

    `key`: of an earlier try, whose response is given again if it came to its end or still runs.
    """
    scope = await _scope_of(scope, body)
    response_id = f"resp_{uuid.uuid4().hex}" if key is None else _id_of(scope.tenant, key)
    digest = digest_of(body.model_dump(exclude={*body.non_semantic_fields, *body.absent_reasoning, "return_state"}))
    earlier = None if key is None or not body.store else await _earlier(scope, response_id, digest)
    if earlier is not None and earlier.response["status"] not in GIVEN_UP:
        return ReadAnswer(scope, earlier)
    opened = opened_response(body, response_id=response_id, model=scope.services.model_name)
    if not body.store:
        return await _open_unstored(scope, body, arrival, opened)
    try:
        opening = await _opening(scope, body, arrival, is_resumable=body.stream or body.background or key is not None)
        return await _open_stored(opening, body, opened, digest=digest, earlier=earlier)
    except VersionConflict:
        if key is None:
            raise
        return ReadAnswer(scope, await load_response(scope, response_id))


async def _scope_of(scope: TenantScope, body: ContextFields) -> TenantScope:
    """That of the model which the request names; without one, of the model of its chain or state, if served here."""
    if body.model is not None or not scope.services.models.has_others:
        return await scope.for_model(body.model)
    chain = await _chain_of(scope, body)
    if chain is None:
        return await scope.for_start(body.model, body.state)
    return await scope.for_session(chain.end.session_id)


async def _chain_of(scope: TenantScope, body: ContextFields) -> Chain | None:
    """What the request goes on from, which may not have ended. Raises NotFound."""
    if body.previous_response_id is not None:
        return (await load_response(scope, body.previous_response_id, param="previous_response_id")).chain
    if body.conversation is None:
        return None
    conversation = await load_conversation(scope, body.conversation, param="conversation")
    running = None if conversation.running_id is None else await find_response(scope, conversation.running_id)
    return conversation.chain if running is None else running.chain


async def _earlier(scope: TenantScope, response_id: str, digest: str) -> StoredResponse | None:
    """The response of an earlier try. Raises KeyReused."""
    found = await find_response(scope, response_id)
    if found is None:
        return None
    if found.digest != digest:
        raise KeyReused("Idempotency-Key was used before for another request; a new request needs a new key")
    return await refresh_status(scope, found)


def _id_of(tenant: str, key: str) -> str:
    return f"resp_{identity_of(tenant, key)}"


async def _open_unstored(
    scope: TenantScope, body: CreateResponseBody, arrival: Arrival, opened: Response
) -> UnstoredResponse:
    context = await find_context(scope, body)
    plan = await make_plan(scope, body, context, body.items())
    opening = await _opening(scope, body, arrival, is_resumable=False)
    try:
        unstored = await open_unstored(
            opening, plan, response_id=opened["id"], is_stream=body.stream, return_state=body.return_state
        )
    except NotFound as error:
        raise _gone(body, error) from error
    return UnstoredResponse(scope.services, unstored, opened)


async def _open_stored(
    opening: Opening, body: CreateResponseBody, opened: Response, *, digest: str, earlier: StoredResponse | None
) -> StoredAnswer:
    scope, items = opening.scope, body.items()
    draft = Draft(
        response=opened,
        input=items,
        conversation_id=body.conversation,
        digest=digest,
        reasoning=body.template_of_answer(scope.services.chat_template).reasoning,
        tool_form=scope.services.chat_template.tool_form,
        earlier=earlier,
    )
    context = await find_context(scope, body)
    try:
        plan = await make_plan(scope, body, context, items)
        stored, turn = await opening.begin(draft, plan, context.conversation, is_shared=context.is_shared)
    except NotFound as error:
        if context.conversation is None or context.chain is None:
            raise _gone(body, error) from error
        # somebody deleted the session behind the conversation: its items are the truth
        context = await _from_the_start(scope, context.conversation)
        plan = await make_plan(scope, body, context, items)
        stored, turn = await opening.begin(draft, plan, context.conversation, is_shared=False)
    ending = save_when_ended(scope, stored, turn)
    return StoredAnswer(scope.services, stored, turn, ending, is_background=body.background)


async def _opening(scope: TenantScope, body: CreateResponseBody, arrival: Arrival, *, is_resumable: bool) -> Opening:
    request = body.to_request(scope.services.limits, scope.services.chat_template)
    spec = await with_grammar(scope.services, scope.tenant, request, arrival)
    scope.services.metrics.requests.body_accepted(n=1, max_tokens=spec.max_tokens)
    return Opening(
        scope=scope,
        sampling=spec.sampling,
        arrival=arrival.time,
        deadline=arrival.time + spec.timeout_s,
        is_resumable=is_resumable,
        outlasts_engine=body.store and body.background,
    )


async def find_context(scope: TenantScope, body: ContextFields) -> Context:
    """Raises NotFound, InvalidRequest, or SessionBusy while its predecessor is still running."""
    if body.previous_response_id is not None:
        return await _after_response(scope, body.previous_response_id)
    if body.conversation is not None:
        return await _in_conversation(scope, body.conversation)
    return Context()


async def make_plan(scope: TenantScope, body: ContextFields, context: Context, items: list[Item]) -> TurnPlan:
    """Raises NotFound when the session behind the context is gone, or InvalidRequest."""
    read = [*context.unread, *items]
    if not read:
        raise InvalidRequest("input must hold at least 1 message: the conversation has none to read", param="input")
    template = body.template_of_answer(scope.services.chat_template)
    if body.state is not None:
        deadline = time.monotonic() + scope.services.settings.request_timeout_s
        state = await scope.services.states.start(scope.tenant, body.state, deadline=deadline)
        return await plan_first_turn(scope, state, template, items=read)
    instructions = body.read_instructions(template.tool_form)
    return await plan_turn(scope, context.chain, template, instructions=instructions, items=read)


async def _after_response(scope: TenantScope, response_id: str) -> Context:
    param = "previous_response_id"
    previous = await refresh_status(scope, await load_response(scope, response_id, param=param))
    if not previous.has_ended:
        raise SessionBusy(f"response {response_id!r} is still in progress")
    status = previous.response["status"]
    if status in GIVEN_UP:
        became = "failed" if status == "failed" else "was cancelled"
        message = f"{param} must name a response that has an answer; {quoted(response_id)} {became}"
        raise InvalidRequest(message, param=param)
    await _require_own_model(scope, previous.chain, param)
    return Context(chain=previous.chain, is_shared=previous.conversation_id is not None)


async def _in_conversation(scope: TenantScope, conversation_id: str) -> Context:
    conversation = await load_conversation(scope, conversation_id, param="conversation")
    if conversation.running_id is not None:
        await _end_running(scope, conversation)
        conversation = await load_conversation(scope, conversation_id, param="conversation")
    if conversation.chain is not None:
        await _require_own_model(scope, conversation.chain, "conversation")
    unread = await read_items(scope, conversation_id, conversation.item_ids[conversation.num_read :])
    return Context(chain=conversation.chain, unread=tuple(unread), conversation=conversation)


async def _require_own_model(scope: TenantScope, chain: Chain, param: str) -> None:
    """Raises StateMismatch: a chain stays with the model that made its sessions, if that is served here."""
    services = scope.services
    if not services.models.has_others:
        return
    try:
        head = await services.store.get(scope.session_key(chain.end.session_id))
    except NotFound:  # it is found out again, and told better
        return
    own = services.models.name_of(head.model_fingerprint)
    if own not in (None, services.model_name):
        raise StateMismatch(
            f"{param} is of the model {own!r} and stays with it; the request names {services.model_name!r}",
            param="model",
        )


async def _from_the_start(scope: TenantScope, conversation: Conversation) -> Context:
    items = await read_items(scope, conversation.id, conversation.item_ids)
    return Context(unread=tuple(items), conversation=conversation)


async def _end_running(scope: TenantScope, conversation: Conversation) -> None:
    """Adds what the newest response gave. Raises SessionBusy while it runs."""
    running = await find_response(scope, conversation.running_id or "")
    if running is None:  # deleted
        await forget_turn(scope, conversation)
        return
    running = await refresh_status(scope, running)
    if not running.has_ended:
        raise SessionBusy(f"conversation {conversation.id!r} is busy: response {running.id!r} is in progress")
    await finish_turn(scope, running)


def _gone(body: ContextFields, error: NotFound) -> NotFound:
    """A session that a client deleted or took back, as the client of a response sees it."""
    name = body.previous_response_id
    if name is None:
        return error
    message = f"response {name!r} cannot be continued: its session was deleted, or rewound past it"
    return NotFound(message, param="previous_response_id", code="previous_response_not_found")


async def count_input_tokens(scope: TenantScope, body: ContextFields) -> int:
    """`usage.input_tokens` of a response with this input. Raises what keeps it from being begun."""
    scope = await _scope_of(scope, body)
    context = await find_context(scope, body)
    try:
        plan = await make_plan(scope, body, context, body.items())
    except NotFound as error:
        raise _gone(body, error) from error
    stands_on = plan.stands_on
    num_before = 0 if stands_on is None else stands_on.num_log_tokens
    num_in_state = 0 if plan.state is None else len(plan.state.file.log_ids)
    return num_before + num_in_state + len(plan.input_ids)
