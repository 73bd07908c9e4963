"""/v1/sessions: create, list, get, change, delete; generate and cancel; fork, rewind; files."""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsm_core.sampling.params import SEED_BITS
from service.deps import Arrival, ArrivalDep, Services, ServicesDep, TenantDep
from service.generate.session_turn import REPLAYED, open_session_turn, read_input, retry_identity, send_turn
from service.named_states.start_state import session_from
from service.schemas.answers import CompletionAnswer, DeletedAnswer, SessionAnswer, SessionPage
from service.schemas.sessions import (
    SESSION_ID,
    AppendBody,
    ClearBody,
    CreateSessionBody,
    ForkBody,
    GenerateBody,
    RewindBody,
    UpdateSessionBody,
    new_session_id,
)
from service.state.at_head import copy_with_head_state
from service.state.copies import read_copy
from service.state.log_location import LogLocation
from service.state.other_model import shown_model
from service.stores.sessions.base import NewSession, SessionHead
from service.stores.sessions.errors import not_found
from service.stores.sessions.key import SessionKey
from service.transfer.import_session import ImportRequest, import_session
from service.transfer.session_file import read_file, write_file
from service.turns.append import AppendRequest, append_to_session
from service.turns.codec import digest_of
from service.turns.fork import ForkRequest, fork_session
from service.turns.rewind import RewindRequest, rewind_session
from service.web.json_body import JsonRoute, json_response
from service.web.live_body import LIVE_OPERATION
from service.web.openapi import ERROR_RESPONSES, answers, generation_responses

MAX_PAGE = 100
FILE_TYPE = "application/octet-stream"
FILE_CONTENT = {"content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}

FILE_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"description": "The file.", **FILE_CONTENT}}

router = APIRouter(route_class=JsonRoute, tags=["sessions"], responses=ERROR_RESPONSES)


def file_body(url: str) -> dict[str, Any]:
    """`openapi_extra=` of a route whose body is a file. `url`: where an example of it is."""
    example = {"exported": {"summary": f"the answer of GET {url}", "externalValue": url}}
    content = {FILE_TYPE: {**FILE_CONTENT["content"][FILE_TYPE], "examples": example}}
    return {"requestBody": {"required": True, "content": content}}


async def get_session_key(session_id: Annotated[str, Path()], tenant: TenantDep) -> SessionKey:
    """A text that could never be an id is an id that does not exist."""
    if not SESSION_ID.fullmatch(session_id):
        raise not_found(session_id)
    return SessionKey(tenant, session_id)


SessionKeyDep = Annotated[SessionKey, Depends(get_session_key)]


@router.post("/v1/sessions", summary="Create a session", response_class=Response, responses=answers(SessionAnswer))
async def create_session(
    services: ServicesDep, tenant: TenantDep, arrival: ArrivalDep, body: CreateSessionBody | None = None
) -> Response:
    """A new session, empty or with the state that it names; 409 when the id is taken. The body may be left out.

    Answers 200, like OpenAI's.
    """
    body = body or CreateSessionBody()
    services = await services.for_start(tenant, body.model, body.state)
    head = await services.store.create(await _new_session(services, tenant, body, arrival))
    return json_response(session_object(services, head))


async def _new_session(services: Services, tenant: str, body: CreateSessionBody, arrival: Arrival) -> NewSession:
    key = SessionKey(tenant, body.id or new_session_id())
    if body.state is None:
        fingerprint = services.backend.model.fingerprint
        return NewSession(key=key, model_fingerprint=fingerprint, metadata=body.metadata, ttl_s=body.ttl_s)
    deadline = arrival.time + services.settings.request_timeout_s
    start = await services.states.start(tenant, body.state, deadline=deadline)
    seed = secrets.randbits(SEED_BITS)
    return await asyncio.to_thread(session_from, start, key, seed=seed, metadata=body.metadata, ttl_s=body.ttl_s)


@router.get(
    "/v1/sessions", summary="List sessions, newest first", response_class=Response, responses=answers(SessionPage)
)
async def list_sessions(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
) -> Response:
    """Newest first."""
    page = await services.store.list(tenant=tenant, limit=limit, cursor=after)
    data = [session_object(services, head) for head in page.heads]
    has_more = page.next_cursor is not None
    return json_response({"object": "list", "data": data, "has_more": has_more, "next_cursor": page.next_cursor})


@router.get(
    "/v1/sessions/{session_id}",
    summary="Get a session",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def get_session(key: SessionKeyDep, services: ServicesDep) -> Response:
    """Where the session is: its version and its position, the number of tokens read so far."""
    head = await services.store.get(key)
    session = session_object(services, head)
    if session["model"] is None:
        session["unserved_model"] = await asyncio.to_thread(shown_model, head.model_fingerprint)
    return json_response(session)


@router.patch(
    "/v1/sessions/{session_id}",
    summary="Change a session's metadata or TTL",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def update_session(key: SessionKeyDep, body: UpdateSessionBody, services: ServicesDep) -> Response:
    """New metadata, as a whole, and a new TTL (null: kept for ever). The TTL begins anew in any case.

    Works while a turn is running, and is not undone by it.
    """
    head = await services.store.update(key, metadata=body.metadata, ttl_s=body.new_ttl_s)
    return json_response(session_object(services, head))


@router.delete(
    "/v1/sessions/{session_id}",
    summary="Delete a session",
    response_class=Response,
    responses=answers(DeletedAnswer),
)
async def delete_session(key: SessionKeyDep, services: ServicesDep) -> Response:
    """Stops a running turn; head, state and token log are gone when this answers."""
    await services.turns_of(key).delete(key)
    return json_response({"id": key.session_id, "object": "session.deleted", "deleted": True})


@router.post(
    "/v1/sessions/{session_id}/generate",
    summary="Generate a session's next turn",
    response_class=Response,
    responses=generation_responses(CompletionAnswer),
)
async def generate(
    key: SessionKeyDep,
    body: GenerateBody,
    services: ServicesDep,
    arrival: ArrivalDep,
    idempotency_key: Annotated[str | None, Header(description="a retry with the same key gets the same turn")] = None,
) -> Response:
    """One turn: reads `input`, or chat `messages`, after all that the session has read, then samples.

    It is committed before the finish reason is sent, and goes on to that when its client leaves. While another turn is
    running the answer is 409 `session_busy`, with `Retry-After`. A retry with the same `Idempotency-Key`, or else with
    the same `expected_version`, and the same body gets the turn that its first try began.
    """
    services.log_prompt(arrival, body.input if body.messages is None else [one.text for one in body.messages])
    turn = await open_session_turn(services, key, body, arrival, idempotency_key=idempotency_key)
    return await send_turn(turn, is_stream=body.stream, request_id=arrival.request_id)


@router.post(
    "/v1/sessions/{session_id}/append",
    summary="Read a text without an answer",
    response_class=Response,
    openapi_extra=LIVE_OPERATION,
    responses=answers(SessionAnswer),
)
async def append(
    key: SessionKeyDep,
    body: AppendBody,
    services: ServicesDep,
    arrival: ArrivalDep,
    idempotency_key: Annotated[str | None, Header(description="a retry with the same key reads nothing twice")] = None,
) -> Response:
    """Reads `input` after all that the session has read, and commits it; nothing is sampled.

    The next turn begins where it ends. `mark` is the version before, for `clear`. A retry with the same
    `Idempotency-Key` and body gets the first answer; with `expected_version` alone it is 409. Neither reads twice.

    A body of lines or plain text is read while it comes: each part is committed at once, and stays.
    """
    services.log_prompt(arrival, body.input)
    services = await services.for_session(key)
    services.prompts.check_size(body.input, param="input")
    digest = digest_of({"append": body.model_dump()})
    request = AppendRequest(
        request_id=f"append-{uuid.uuid4().hex}",
        key=key,
        input_ids=await read_input(services, body.input),
        is_verbatim=isinstance(body.input, list),
        expected_version=body.expected_version,
        arrival=arrival.time,
        deadline=arrival.time + services.settings.request_timeout_s,
        identity=None if idempotency_key is None else retry_identity(idempotency_key, None, digest),
        digest=digest,
    )
    done = await append_to_session(services.turns, services.backend, services.store, services.tenants, request)
    extra = {"mark": done.mark, "num_appended": done.num_tokens}
    response = json_response({**session_object(services, done.head), **extra})
    if done.is_replay:
        response.headers[REPLAYED] = "true"
    return response


@router.post(
    "/v1/sessions/{session_id}/clear",
    summary="Return to a mark",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def clear(key: SessionKeyDep, body: ClearBody, services: ServicesDep, arrival: ArrivalDep) -> Response:
    """Back to a mark: what was appended or answered since is deleted. It is a new version itself."""
    location = LogLocation(version=body.mark, position=None, field="mark")
    return await _move_back(key, location, services, arrival, verb="clear", expected_version=body.expected_version)


@router.post(
    "/v1/sessions/{session_id}/cancel",
    summary="Cancel a session's running turn",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def cancel(key: SessionKeyDep, services: ServicesDep) -> Response:
    """Stops the running turn, if there is one; `cancelled` tells. The session stays at its last commit."""
    was_cancelled = await services.turns_of(key).cancel(key)
    head = await services.store.get(key)
    return json_response({**session_object(services, head), "cancelled": was_cancelled})


@router.post(
    "/v1/sessions/{session_id}/fork",
    summary="Fork a session",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def fork(
    key: SessionKeyDep, services: ServicesDep, arrival: ArrivalDep, body: ForkBody | None = None
) -> Response:
    """A new session that continues from the newest commit of this one, at the same version, or from an earlier one.

    A running turn does not prevent it, and is not part of the copy.
    """
    body = body or ForkBody()
    services = await services.for_session(key)
    request = ForkRequest(
        source=key,
        target=SessionKey(key.tenant, body.id or new_session_id()),
        deadline=arrival.time + services.settings.request_timeout_s,
        find_end=None if body.location is None else body.location.num_log_tokens,
        metadata=body.metadata,
        find_ttl_s=body.ttl_s_over,
    )
    head = await fork_session(services.turns, services.backend, services.store, services.tenants, request)
    return json_response(session_object(services, head))


@router.post(
    "/v1/sessions/{session_id}/rewind",
    summary="Rewind a session",
    response_class=Response,
    responses=answers(SessionAnswer),
)
async def rewind(key: SessionKeyDep, body: RewindBody, services: ServicesDep, arrival: ArrivalDep) -> Response:
    """Back to the end of an earlier turn, or to any token of the log; what came after it is deleted.

    It is a new version itself. The state is made by reading the log that stays; a running turn makes it 409.
    """
    location = LogLocation(version=body.to_version, position=body.to_position, prefix="to_")
    return await _move_back(key, location, services, arrival, verb="rewind", expected_version=body.expected_version)


async def _move_back(
    key: SessionKey,
    location: LogLocation,
    services: Services,
    arrival: Arrival,
    *,
    verb: str,
    expected_version: int | None,
) -> Response:
    """`verb`: begins the request's id."""
    services = await services.for_session(key)
    request = RewindRequest(
        request_id=f"{verb}-{uuid.uuid4().hex}",
        key=key,
        location=location,
        expected_version=expected_version,
        deadline=arrival.time + services.settings.request_timeout_s,
    )
    head = await rewind_session(services.turns, services.backend, services.store, request)
    return json_response(session_object(services, head))


@router.get(
    "/v1/sessions/{session_id}/export",
    summary="Export a session as a file",
    response_class=Response,
    responses=FILE_RESPONSES,
)
async def export_session(key: SessionKeyDep, services: ServicesDep, arrival: ArrivalDep) -> Response:
    """The session at its newest commit as one file: state, token log, metadata, checksum.

    Signed if the server signs.
    """
    services = await services.for_session(key)
    copy = await read_copy(services.store, key)
    with services.tenants.enter(key.tenant):  # it may have to read a part of the log
        copy = await copy_with_head_state(
            services.backend,
            services.turns.keeper,
            copy,
            deadline=arrival.time + services.settings.request_timeout_s,
        )
    fingerprint = services.backend.tokenizer.fingerprint
    raw = await asyncio.to_thread(
        lambda: services.states.seal.seal(write_file(copy, tokenizer_fingerprint=fingerprint))
    )
    headers = {"content-disposition": f'attachment; filename="{key.session_id}.nsm-session"'}
    return Response(raw, media_type=FILE_TYPE, headers=headers)


@router.post(
    "/v1/sessions/import",
    summary="Import a session from a file",
    response_class=Response,
    openapi_extra=file_body("/v1/sessions/harbour/export"),
    responses=answers(SessionAnswer),
)
async def import_file(
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    arrival: ArrivalDep,
    session_id: Annotated[str | None, Query(alias="id", description="the file's own when absent")] = None,
    rebuild: Annotated[bool, Query(description="let the running model read the log of another one's file")] = False,
) -> Response:
    """A session from an exported file (the body). 409 `state_mismatch` when another model wrote it."""
    require_file_type(request.headers.get("content-type", ""), kind="session")
    body = await request.body()
    seal = services.states.seal
    file = await asyncio.to_thread(lambda: read_file(seal.open(body)))
    services = await services.models.of_fingerprint(file.header.model_fingerprint)
    fields = {"id": session_id or file.header.session_id, "metadata": file.header.metadata, "ttl_s": file.header.ttl_s}
    try:
        checked = CreateSessionBody.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    wanted = ImportRequest(
        request_id=f"import-{uuid.uuid4().hex}",
        key=SessionKey(tenant, checked.id or new_session_id()),
        metadata=checked.metadata,
        ttl_s=checked.ttl_s,
        is_rebuild_allowed=rebuild,
        deadline=arrival.time + services.settings.request_timeout_s,
        state_format=services.state_format,
    )
    with services.tenants.enter(tenant):  # it may have to read the file's log
        head, is_rebuilt = await import_session(services.backend, services.store, file, wanted)
    extra = {"rebuilt": "fingerprint_mismatch"} if is_rebuilt else {}
    return json_response({**session_object(services, head), **extra})


def require_file_type(value: str, *, kind: str) -> None:
    """Raises HTTPException 415. A web page can post plain text or a form to any server, but not this type."""
    if value.partition(";")[0].strip().lower() != FILE_TYPE:
        raise HTTPException(415, f"the Content-Type of a {kind}'s file must be {FILE_TYPE}, got {value or 'none'}")


def session_object(services: Services, head: SessionHead) -> dict[str, Any]:
    """`model` is null for a session of a model that is not served here; `state_bytes` also while it is not loaded."""
    name = services.models.name_of(head.model_fingerprint)
    loaded = None if name is None else services.models.loaded_as(name)
    return {
        "id": head.session_id,
        "object": "session",
        "version": head.version,
        "position": head.position,
        "created_at": int(head.created_at),
        "updated_at": int(head.updated_at),
        "model": name,
        "model_fingerprint": head.model_fingerprint,
        "state_bytes": None if loaded is None else loaded.backend.model.state_bytes,
        "snapshot_bytes": head.snapshot_bytes,
        "metadata": dict(head.metadata),
        "ttl_s": head.ttl_s,
        "expires_at": None if head.expires_at is None else math.ceil(head.expires_at),
        "forked_from": head.forked_from,
        "replica": head.replica or None,
    }
