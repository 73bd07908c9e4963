"""Error -> status, type, code and headers, in one place; every refusal leaves the server in one shape."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from nsm_core.errors import (
    BodyTooLarge,
    BodyTooSlow,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    Forbidden,
    GrammarFailed,
    InvalidRequest,
    KeyReused,
    LeaseLost,
    LogCorrupt,
    MisdirectedRequest,
    ModelUnavailable,
    NotFound,
    NsmError,
    NumericalError,
    Overloaded,
    QuotaExceeded,
    RateLimited,
    ServerStopping,
    SessionBusy,
    SnapshotCorrupt,
    StateMismatch,
    StepFailed,
    StorageFull,
    StoreDamaged,
    StoreReplaced,
    StoreUnavailable,
    TurnCancelled,
    Unauthenticated,
    VersionConflict,
)
from service.messages import validation_message, wrong_length
from service.telemetry.request_context import current_request

logger = logging.getLogger("nsm.errors")

INVALID = "invalid_request_error"
NOT_FOUND = "not_found_error"
SERVER = "server_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
RATE_LIMIT = "rate_limit_error"
MAX_SHOWN_CHARS = 80  # of a bad value, in a message


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of error is answered.

    `retry`: whether stock clients shall try again by themselves; None leaves it to their own rule (they retry 408, 409,
    429 and 5xx).
    """

    status: int
    type: str
    code: str | None
    retry: bool | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


RULES: Mapping[type[NsmError], Rule] = {
    InvalidRequest: Rule(400, INVALID, None),
    NotFound: Rule(404, NOT_FOUND, "not_found"),
    BodyTooLarge: Rule(413, INVALID, "body_too_large"),
    # the rest of the body would be read as the next request
    BodyTooSlow: Rule(408, INVALID, "request_timeout", headers={"connection": "close"}),
    Unauthenticated: Rule(401, AUTHENTICATION, "invalid_api_key", headers={"www-authenticate": 'Bearer realm="nsm"'}),
    Forbidden: Rule(403, PERMISSION, "forbidden"),
    MisdirectedRequest: Rule(421, INVALID, "misdirected_request", retry=False),
    RateLimited: Rule(429, RATE_LIMIT, "rate_limit_exceeded"),
    # until something is deleted, the same request meets the same limit
    QuotaExceeded: Rule(429, RATE_LIMIT, "quota_exceeded", retry=False),
    SessionBusy: Rule(409, INVALID, "session_busy"),
    # nothing was committed, and the session may be free by now
    LeaseLost: Rule(409, INVALID, "lease_lost", retry=True),
    # a client cancelled it
    TurnCancelled: Rule(409, INVALID, "turn_cancelled", retry=False),
    # the same request again meets the same version, the same model, the same bytes
    VersionConflict: Rule(409, INVALID, "version_conflict", retry=False),
    KeyReused: Rule(422, INVALID, "idempotency_key_reused", retry=False),
    StateMismatch: Rule(409, INVALID, "state_mismatch", retry=False),
    SnapshotCorrupt: Rule(500, SERVER, "snapshot_corrupt", retry=False),
    LogCorrupt: Rule(500, SERVER, "log_corrupt", retry=False),
    Overloaded: Rule(503, SERVER, "overloaded"),
    ServerStopping: Rule(503, SERVER, "server_stopping"),
    EngineDead: Rule(503, SERVER, "engine_dead"),
    ModelUnavailable: Rule(503, SERVER, "model_unavailable"),
    StoreUnavailable: Rule(503, SERVER, "store_unavailable"),
    # until an operator has repaired the files; stock clients would retry within seconds
    StoreDamaged: Rule(503, SERVER, "store_damaged", retry=False),
    StoreReplaced: Rule(503, SERVER, "store_replaced", retry=False),
    # the client set the deadline: an automatic retry would only double the load
    DeadlineExceeded: Rule(504, SERVER, "deadline_exceeded", retry=False),
    # the same grammar meets the same limit
    GrammarFailed: Rule(422, INVALID, "grammar_failed", retry=False),
    NumericalError: Rule(500, SERVER, "numerical_error", retry=False),
    # it may be this request that steps fail with
    StepFailed: Rule(500, SERVER, "step_failed", retry=False),
    # Retry-After is information; stock clients would retry within seconds
    StorageFull: Rule(507, SERVER, "storage_full", retry=False),
    CheckpointError: Rule(500, SERVER, "checkpoint_error", retry=False),
    ConfigError: Rule(500, SERVER, "config_error", retry=False),
}
INTERNAL = Rule(500, SERVER, "internal_error")
NAMED_ERRORS = (
    "unknown_parameter",
    "unsupported_parameter",
    "missing_field",
)  # of service/schemas, with name and message in ctx
HTTP_TYPES = {404: NOT_FOUND, 401: AUTHENTICATION, 403: PERMISSION, 429: RATE_LIMIT}
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type", 426: "upgrade_required"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The standard error body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        body = orjson.dumps(self.body())
        return Response(body, self.status, headers=dict(self.headers), media_type="application/json")


def answer(error: Exception, *, request_id: str | None = None) -> ErrorAnswer:
    """Any exception as an answer. An unexpected one shows the client the request id only; see `report`.

    The current request is recorded as one that ended in an error.
    """
    made = _answer(error, request_id)
    request = current_request()
    if request is not None:
        request.error = made.code or made.type
    return made


def _answer(error: Exception, request_id: str | None) -> ErrorAnswer:
    if isinstance(error, NsmError):
        return _answer_deliberate(error)
    if isinstance(error, RequestValidationError):
        return _answer_validation(error.errors())
    if isinstance(error, HTTPException):
        return _answer_http(error)
    message = f"internal error; the server's log has details under request id {request_id}"
    return ErrorAnswer(status=INTERNAL.status, type=INTERNAL.type, message=message, code=INTERNAL.code)


def report(error: Exception, *, request_id: str | None) -> None:
    """Log errors for the operator: refusals below 500 are not logged, unexpected errors come with their traceback."""
    if isinstance(error, NsmError):
        if rule_of(error).status >= 500:
            is_loss = isinstance(error, SnapshotCorrupt | StoreDamaged)  # of stored bytes
            level = logging.ERROR if is_loss else logging.WARNING
            logger.log(level, "request %s: %s: %s", request_id, type(error).__name__, error.with_notes())
    elif not isinstance(error, RequestValidationError | HTTPException):
        logger.error("request %s failed", request_id, exc_info=error)


async def handle(request: Request, error: Exception) -> Response:
    """The exception handler of the whole application."""
    request_id = request.scope.get("state", {}).get("request_id")
    if isinstance(error, HTTPException) and error.detail == "Not Found":
        error = HTTPException(404, _nothing_at(request.scope))
    elif isinstance(error, HTTPException) and error.status_code == 405:
        error = _method_not_allowed(request, error)
    report(error, request_id=request_id)
    return answer(error, request_id=request_id).response()


async def raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """What no route takes. The router's own end answers 403 to a WebSocket."""
    raise HTTPException(404)


def _nothing_at(scope: Scope) -> str:
    if scope["type"] == "websocket":
        return f"no WebSocket is served at {scope['path']}"
    return f"nothing is served at {scope['method']} {scope['path']}"


def _method_not_allowed(request: Request, error: HTTPException) -> HTTPException:
    """With the method and all that the path has, in the message and in `Allow`; the router knows one route's only.

    HEAD is answered wherever GET is: `AnswerHead`.
    """
    at_path = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in at_path for method in getattr(route, "methods", None) or ()}
    allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
    message = f"{request.method} is not allowed at {request.url.path}, only {allowed}"
    return HTTPException(405, message, {**(error.headers or {}), "Allow": allowed})


def rule_of(error: NsmError) -> Rule:
    """The rule of the nearest class in the error's own line; a bare NsmError is an internal error."""
    return next((RULES[cls] for cls in type(error).__mro__ if cls in RULES), INTERNAL)


def shown(value: object) -> str:
    """A bad value for a message, in JSON as the client wrote it, cut when long."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
    elif isinstance(value, list | dict) and len(value) > MAX_SHOWN_CHARS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} items"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def field_path(parts: Sequence[int | str]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _answer_deliberate(error: NsmError) -> ErrorAnswer:
    rule = rule_of(error)
    headers = dict(rule.headers)
    retry_after_s = getattr(error, "retry_after_s", 1.0 if isinstance(error, EngineDead) else None)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if rule.retry is not None:
        headers["x-should-retry"] = "true" if rule.retry else "false"
    return ErrorAnswer(
        status=rule.status,
        type=rule.type,
        message=str(error),
        param=getattr(error, "param", None),
        code=getattr(error, "code", None) or rule.code,
        headers=headers,
    )


def _answer_http(error: HTTPException) -> ErrorAnswer:
    error_type = HTTP_TYPES.get(error.status_code, INVALID if error.status_code < 500 else SERVER)
    return ErrorAnswer(
        status=error.status_code,
        type=error_type,
        message=str(error.detail),
        code=HTTP_CODES.get(error.status_code),
        headers=error.headers or {},
    )


def _answer_validation(errors: Sequence[Any]) -> ErrorAnswer:
    """The first of pydantic's errors: a client fixes one field at a time."""
    item = errors[0]
    location = [part for part in item["loc"] if part not in ("body", "query", "path", "header")]
    if item["type"] in NAMED_ERRORS:
        name, message = field_path([*location, item["ctx"]["name"]]), item["ctx"]["message"]
        message = message if item["type"] == "unknown_parameter" else f"{name} {message}"
        code = None if item["type"] == "missing_field" else item["type"]
        return ErrorAnswer(status=400, type=INVALID, message=message, param=name, code=code)
    param = field_path(location) or None
    if item["type"] == "missing":
        message = f"{param or 'a JSON body'} is required"
    else:
        length = wrong_length(item)
        given = shown(item.get("input")) if length is None else length
        message = f"{param or 'the body'} {validation_message(item)}, got {given}"
    return ErrorAnswer(status=400, type=INVALID, message=message, param=param)
