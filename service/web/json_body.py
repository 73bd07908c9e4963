"""JSON in and out. A body is UTF-8 JSON as orjson reads it: no NaN or Infinity, no unpaired surrogates, nesting of at
most 1,024 levels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Coroutine
from email.message import Message
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.messages import quoted

IGNORED_QUERY = frozenset({"include_obfuscation"})  # of OpenAI's clients; an answer has none in any case

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, raw: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._parsed = parse(raw)

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._parsed


class JsonRoute(APIRoute):
    """For routers (`APIRouter(route_class=JsonRoute)`): bodies go through `parse`, not through `json.loads`."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        known = {field.alias for field in self.dependant.query_params} | IGNORED_QUERY

        async def parse_then_handle(request: Request) -> Response:
            refuse_unknown_query(request, known)
            check_encoding(request.headers.get("content-encoding", ""))
            if self.body_field is not None:
                raw = await request.body()
                if raw or self.body_field.field_info.is_required():
                    check_content_type(request.headers.get("content-type", ""))
                    request = JsonRequest(request, raw)
            return await handler(request)

        return parse_then_handle


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as an answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def parse(raw: bytes) -> Any:
    """The value of a JSON text; raises InvalidRequest."""
    if not raw:
        raise InvalidRequest("a JSON body is required, got an empty one", code="invalid_json")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def check_content_type(value: str) -> None:
    """Raises HTTPException 415. Strict, so that no web page can post to a local server as a plain form."""
    message = Message()
    message["content-type"] = value or "none/none"
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise HTTPException(415, f"the Content-Type must be application/json, got {value or 'none'}")


def check_encoding(value: str) -> None:
    """Raises HTTPException 415 for a compressed body."""
    if value.lower() not in ("", "identity"):
        raise HTTPException(415, f"a body must be sent as it is, without a Content-Encoding, got {value}")


def refuse_unknown_query(request: Request, known: Collection[str]) -> None:
    """Raises InvalidRequest: a misspelt name must not run with the default."""
    for name in request.query_params:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            message = f"unknown query parameter {quoted(name)}{hint}"
            raise InvalidRequest(message, param=name, code="unknown_parameter")
