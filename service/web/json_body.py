"""JSON in and out. Bodies are read strictly: UTF-8, no NaN or Infinity, no unpaired surrogates, bounded nesting, and no
name twice in an object.
"""

from __future__ import annotations

import codecs
import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Coroutine, Iterator
from email.message import Message
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.messages import quoted
from service.web.errors import field_path

MAYBE_LARGE = re.compile(rb"[0-9]{19}")  # 2**63 has so many digits
MAX_INT_CHARS = 100  # what is longer is no number that somebody meant

HARMLESS_QUERY = frozenset({"include_obfuscation"})  # of OpenAI's clients; an answer has none in any case

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
        known = {field.alias for field in self.dependant.query_params} | HARMLESS_QUERY

        async def parse_then_handle(request: Request) -> Response:
            refuse_unknown_query(request, known)
            check_encoding(request.headers.get("content-encoding", ""))
            if self.body_field is not None:
                raw = await request.body()
                if raw or self.body_field.field_info.is_required():
                    check_content_type(request.headers.get("content-type", ""))
                    refuse_utf16(raw)
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
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        refuse_non_finite(raw)
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    is_flat = isinstance(value, dict) and raw.count(b":") == len(value)  # each name has one: none is there twice
    return value if is_flat and not MAYBE_LARGE.search(raw) else exact(raw, value)


def exact(raw: bytes, value: Any) -> Any:
    """`raw` with its integers as they were sent: orjson makes floats of those above 64 bits, and whoever sent one shall
    read his own number in the refusal. `value`: what orjson made of it. Raises InvalidRequest for a name that an object
    has twice, of which orjson would take the last.
    """
    try:
        return json.loads(raw, parse_int=_whole, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                message = f"{quoted(name)} stands in an object more than once"
                raise InvalidRequest(message, param=name, code="duplicate_parameter")
            names.add(name)
    return found


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= MAX_INT_CHARS else float(text)


def refuse_non_finite(raw: bytes) -> None:
    """Raises InvalidRequest naming the first field with NaN, Infinity or 1e999, if that is all that is wrong.

    It is no JSON, but Python's own encoder writes it, so it is a wrong value to whoever sent it.
    """
    try:
        value = json.loads(raw.decode())
        found = next(non_finite_fields(value), None)
    except (ValueError, RecursionError):
        return
    if found is not None and found[0]:
        param, number = field_path(found[0]), json.dumps(found[1])
        raise InvalidRequest(f"{param} must be a finite number, got {number}", param=param, code="invalid_json")


def non_finite_fields(value: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], float]]:
    """Each number in a parsed JSON value that is not finite, with the way to it, in the order of the text."""
    if isinstance(value, float) and not math.isfinite(value):
        yield place, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from non_finite_fields(part, (*place, key))


def check_content_type(value: str) -> None:
    """Raises HTTPException 415. Strict, so that no web page can post to a local server as a plain form."""
    message = Message()
    message["content-type"] = value or "none/none"
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise HTTPException(415, f"the Content-Type must be application/json, got {value or 'none'}")
    charset = str(message.get_param("charset", "utf-8")).lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise HTTPException(415, f"a body must be JSON in UTF-8, the Content-Type says {charset}")


def check_encoding(value: str) -> None:
    """Raises HTTPException 415 for a body that would first have to be unpacked."""
    if value.lower() not in ("", "identity"):
        raise HTTPException(415, f"a body must be sent as it is, without a Content-Encoding, got {value}")


def refuse_utf16(raw: bytes) -> None:
    """Raises HTTPException 415. UTF-32 begins like it."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise HTTPException(415, "a body must be JSON in UTF-8, this one begins like UTF-16")


def refuse_unknown_query(request: Request, known: Collection[str]) -> None:
    """Raises InvalidRequest: as in bodies, what is misspelt must not run with the default."""
    for name in request.query_params:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            message = f"unknown query parameter {quoted(name)}{hint}"
            raise InvalidRequest(message, param=name, code="unknown_parameter")
