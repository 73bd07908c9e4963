"""One line of a batch: its body -> the answer that the endpoint gives to the same body, as a line of the output."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nsm_core.errors import (
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    RateLimited,
    SessionBusy,
    StorageFull,
    StoreUnavailable,
)
from nsm_core.hashing import identity_of
from service.backends.background import in_background
from service.batches.input_lines import InputLine
from service.deps import Arrival, Services, TenantScope
from service.generate.chat import open_chat
from service.generate.completions import open_completion
from service.generate.embeddings import open_embeddings
from service.responses.create import open_response
from service.schemas.chat import ChatBody
from service.schemas.completions import CompletionBody
from service.schemas.embeddings import EmbeddingsBody
from service.schemas.responses import CreateResponseBody
from service.served_models import holding_models
from service.web.errors import answer, report

Body = TypeVar("Body", ChatBody, CompletionBody, CreateResponseBody, EmbeddingsBody)

PASSING = (
    ModelUnavailable,
    Overloaded,
    RateLimited,
    SessionBusy,
    StorageFull,
    StoreUnavailable,
)  # a later try may succeed
RETRY_S = 0.5
MODEL_CHANGED = "model_changed"


class Answer(Protocol):
    """An admitted request of any endpoint."""

    async def collect(self) -> dict[str, Any]: ...

    def leave(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """Of a batch's line. `key`: the same whenever the line is run, so that a stored response is made once."""

    services: Services
    tenant: str
    line: InputLine
    key: str


async def run_line(request: LineRequest, *, endpoint: str) -> dict[str, Any]:
    """The line of the output. Waits where the server has no room; a refusal is a result too."""
    request_id = f"batch_req_{request.key}"
    while True:
        try:
            status, body = 200, await _collect(request, endpoint, request_id)
        except PASSING:
            await asyncio.sleep(RETRY_S)
            continue
        except Exception as error:
            report(error, request_id=request_id)
            refusal = answer(error, request_id=request_id)
            status, body = refusal.status, refusal.body()
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {"id": request_id, "custom_id": request.line.custom_id, "response": response, "error": None}


def is_failed(result: dict[str, Any]) -> bool:
    return result["response"] is None or result["response"]["status_code"] != 200


def num_requests_of(body: dict[str, Any]) -> int:
    """How many of the engine's requests a line makes; a guess for a body that will be refused."""
    prompt, counts = body.get("prompt"), (body.get("n"), body.get("best_of"))
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return num_prompts * max((count for count in counts if type(count) is int), default=1)


def expired_line(line: InputLine, key: str) -> dict[str, Any]:
    """Of a request that was not run in time."""
    return _line_not_run(line, key, "batch_expired", "this request was not run within the completion window")


def changed_line(line: InputLine, key: str) -> dict[str, Any]:
    """Of a request whose model has other weights than when the batch began."""
    return _line_not_run(line, key, MODEL_CHANGED, "the model was replaced during the batch: send it in a new batch")


def _line_not_run(line: InputLine, key: str, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{key}", "custom_id": line.custom_id, "response": None, "error": error}


def key_of(batch_id: str, number: int) -> str:
    return identity_of(batch_id, str(number))[:32]


async def _collect(request: LineRequest, endpoint: str, request_id: str) -> dict[str, Any]:
    services, tenant = request.services, request.tenant
    await services.tenants.check_stored_bytes(tenant)
    arrival = Arrival(request_id=request_id, time=time.monotonic())
    with holding_models(), in_background():
        opened = await OPENERS[endpoint](request, arrival)
        try:
            return await opened.collect()
        finally:
            opened.leave()


async def _open_chat(request: LineRequest, arrival: Arrival) -> Answer:
    body = _read(ChatBody, request.line.body)
    return await open_chat(request.services, request.tenant, body, arrival)


async def _open_completion(request: LineRequest, arrival: Arrival) -> Answer:
    body = _read(CompletionBody, request.line.body)
    return await open_completion(request.services, request.tenant, body, arrival)


async def _open_response(request: LineRequest, arrival: Arrival) -> Answer:
    body = _read(CreateResponseBody, request.line.body)
    if body.background:
        raise InvalidRequest("background is not for a line of a batch, which waits for its answer", param="background")
    scope = TenantScope(request.services, request.tenant)
    return await open_response(scope, body, arrival, key=request.key)


def _read(kind: type[Body], value: dict[str, Any]) -> Body:
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    if getattr(body, "stream", False):
        raise InvalidRequest("stream is not for a line of a batch", param="stream")
    return body


async def _open_embeddings(request: LineRequest, arrival: Arrival) -> Answer:
    body = _read(EmbeddingsBody, request.line.body)
    return await open_embeddings(request.services, request.tenant, body, arrival)


OPENERS: dict[str, Callable[[LineRequest, Arrival], Awaitable[Answer]]] = {
    "/v1/chat/completions": _open_chat,
    "/v1/completions": _open_completion,
    "/v1/responses": _open_response,
    "/v1/embeddings": _open_embeddings,
}
