"""JSON in and out. A body is UTF-8 JSON as orjson reads it: no NaN or Infinity, no unpaired surrogates, nesting of at
most 1,024 levels, no name twice in one object.

The event loop serves every stream, so large bodies are parsed and checked on a thread. Objects and lists are counted
before anything is made of them: each costs far more time and memory than its two bytes.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from email.message import Message
from typing import Any

import numpy as np
import orjson
from fastapi._compat import ModelField, Undefined
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.messages import HINT_CUTOFF, quoted
from service.web.arguments import Arguments, arguments_of
from service.web.deferred_route import DeferredRoute
from service.web.headers import header

INLINE_BYTES = 32 * 1024  # larger bodies are read on a thread
MAX_PARTS = 150_000  # objects, lists and members of a body: 37,500 messages of two fields, more than a prompt may have
MARKS = (b"[", b"{", b":")  # with each of which one of these begins
IGNORED_QUERY = frozenset({"include_obfuscation"})  # of OpenAI's clients; an answer has none in any case

UTF8_NAMES = frozenset({"utf-8", "utf8", "us-ascii"})  # the last is a part of it
MAX_DEPTH = 1024  # orjson's own limit
# The brackets, and the strings with the colon of those that are names
SCANNED = re.compile(rb'("(?:[^"\\]++|\\.)*+")\s*+(:?)|[\[\]{}]', re.DOTALL)
NO_NUMBER = re.compile(r"-?(?:NaN|Infinity)")
NAME_AT_END = re.compile(r'("(?:[^"\\]|\\.)*")\s*:\s*-?$')
MAX_NAME = 256  # characters before a value in which its name is looked for
WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, raw: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self.raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self.raw

    async def json(self) -> Any:
        return self._value


class JsonRoute(DeferredRoute):
    """For routers (`APIRouter(route_class=JsonRoute)`): bodies go through `parse`, not through `json.loads`.

    `direct`: its handler without the framework; None for endpoints that need more of it.
    """

    direct: Handler | None

    def get_route_handler(self) -> Handler:
        arguments = arguments_of(self.dependant)
        self.direct = None if arguments is None else self._reading(calling(arguments))
        return self._reading(super().get_route_handler())

    def _reading(self, handler: Handler) -> Handler:
        """`handler`, which gets a JsonRequest where there is a body."""
        fields = self.dependant.query_params
        known = {field.alias for field in fields} | IGNORED_QUERY
        whole = {field.alias for field in fields if field.field_info.annotation in (int, int | None)}
        body_field = self.body_field
        # A handler that takes the request reads its body itself. Those of GET have no meaning
        is_read_here = self.dependant.request_param_name is None
        has_no_fields = body_field is None and is_read_here and "GET" not in (self.methods or ())
        # of a second route at the same path, which this one describes beside its own
        others = tuple((self.openapi_extra or {}).get("requestBody", {}).get("content", {}))

        async def parse_then_handle(request: Request) -> Response:
            if request.scope["query_string"]:
                check_query(request.query_params.multi_items(), known, whole)
            check_encoding(header(request.scope, b"content-encoding"))
            if body_field is not None:
                raw = await request.body()
                if raw or body_field.field_info.is_required():
                    check_content_type(header(request.scope, b"content-type"), others)
                    is_large = len(raw) > INLINE_BYTES
                    value = await asyncio.to_thread(read_large, raw, body_field) if is_large else parse(raw)
                    request = JsonRequest(request, raw, value)
            elif has_no_fields and (raw := await request.body()):
                check_content_type(header(request.scope, b"content-type"))
                is_large = len(raw) > INLINE_BYTES
                check_no_fields(await asyncio.to_thread(parse_large, raw) if is_large else parse(raw))
            try:
                return await handler(request)
            except RequestValidationError as error:
                exact = with_whole_numbers(request, error)
                if exact is None:
                    raise
                return await handler(exact)

        return parse_then_handle


def calling(arguments: Arguments) -> Handler:
    """Calls an endpoint that answers with a Response itself."""

    async def handler(request: Request) -> Response:
        body = await request.json() if isinstance(request, JsonRequest) and request.raw else Undefined
        response: Response = await arguments.call(**await arguments.of(request, body))
        return response

    return handler


def with_whole_numbers(request: Request, error: RequestValidationError) -> JsonRequest | None:
    """The request for another check if a number failed that orjson read as a float, having more than 64 bits.

    As an integer it fails by the bounds of its field. None: no such number, or a large body.
    """
    is_rounded = any(item["type"] == "int_type" and isinstance(item["input"], float) for item in error.errors())
    if not is_rounded or not isinstance(request, JsonRequest) or len(request.raw) > INLINE_BYTES:
        return None
    try:
        return JsonRequest(request, request.raw, json.loads(request.raw))
    except (ValueError, RecursionError):  # of thousands of digits; nested deeply
        return None


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
        name = _name_of_no_number(error)
        if name is not None:
            reason = f"the body is not valid JSON: {quoted(name)} must be a finite number"
            raise InvalidRequest(reason, param=name, code="invalid_json") from error
        reason = f"the body is not valid JSON: {_bytes_that_are_no_text(raw) or error}"
        if error.msg.startswith("depth limit"):
            reason = f"the body is nested too deeply: at most {MAX_DEPTH} levels are read"
        raise InvalidRequest(reason, code="invalid_json") from error
    if _may_repeat_a_name(raw, value) and (name := repeated_name(raw)) is not None:
        raise InvalidRequest(f"{quoted(name)} must be given once in its object", param=name)
    return value


def _bytes_that_are_no_text(raw: bytes) -> str | None:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"the byte 0x{raw[error.start]:02x} at {error.start} is not UTF-8"
    return None


def _name_of_no_number(error: orjson.JSONDecodeError) -> str | None:
    """The name whose value is NaN or infinite, where this is why reading ended: Python's json writes such values."""
    is_literal = NO_NUMBER.match(error.doc, error.pos) is not None
    if not is_literal and not error.msg.startswith("number is infinity"):
        return None
    found = NAME_AT_END.search(error.doc[max(0, error.pos - MAX_NAME) : error.pos])
    return None if found is None else str(json.loads(found[1]))


def _may_repeat_a_name(raw: bytes, value: Any) -> bool:
    """False for nearly all bodies, at a tenth of the cost of `repeated_name`: no colon was lost in reading."""
    try:
        return b"\\u003" in raw or raw.count(b":") != orjson.dumps(value).count(b":")  # \u003a is a colon, too
    except TypeError:  # deeper than orjson writes
        return True


def repeated_name(raw: bytes) -> str | None:
    """A name that an object of a valid JSON text has twice; orjson takes the last of its values."""
    names: list[set[str]] = []  # of the objects and lists around
    for found in SCANNED.finditer(raw):
        text, colon = found.groups()
        if colon:
            name = str(orjson.loads(text))
            if name in names[-1]:
                return name
            names[-1].add(name)
        elif text is None and found[0] in b"[{":
            names.append(set())
        elif text is None:
            names.pop()
    return None


def check_no_fields(value: Any) -> None:
    """Raises InvalidRequest for the body of a route without fields, unless it is empty; null is absence."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
    name = next((name for name, given in value.items() if given is not None), None)
    if name is not None:
        raise InvalidRequest(f"unknown field {quoted(name)}", param=name, code="unknown_parameter")


def read_large(raw: bytes, field: ModelField) -> Any:
    """The checked body, which FastAPI takes as it is. Raises InvalidRequest or RequestValidationError."""
    value, errors = field.validate(parse_large(raw), {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors)
    return value


def parse_large(raw: bytes) -> Any:
    """As `parse`, after its parts were counted."""
    num_parts = count_parts(raw)
    if num_parts > MAX_PARTS:
        message = f"the body must have at most {MAX_PARTS} objects, lists and members of objects, got {num_parts}"
        raise InvalidRequest(message, code="too_many_values")
    return parse(raw)


def count_parts(raw: bytes) -> int:
    """How many objects, lists and members of objects a JSON text has. For bytes that are no JSON, some number."""
    if sum(map(raw.count, MARKS)) <= MAX_PARTS:  # most bodies, in a tenth of the time
        return 0
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    marks = np.flatnonzero(np.isin(text, [ord(mark) for mark in MARKS]))
    num_quotes_before = np.searchsorted(np.flatnonzero(text == ord('"')), marks)
    return int(np.count_nonzero(num_quotes_before % 2 == 0))  # the others stand in strings


def check_content_type(value: str, others: tuple[str, ...] = ()) -> None:
    """Raises HTTPException 415 for all but JSON, so that no web page can post to a local server as a plain form.

    `others`: types that are taken at the same path elsewhere, for the message.
    """
    problem = _problem_with(value, others)
    if problem is not None:
        raise HTTPException(415, problem)


@functools.lru_cache(maxsize=64)  # clients send one of a few
def _problem_with(value: str, others: tuple[str, ...]) -> str | None:
    message = Message()
    message["content-type"] = value or "none/none"
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        *first, last = ("application/json", *others)
        allowed = f"{', '.join(first)} or {last}" if first else last
        return f"the Content-Type must be {allowed}, got {value or 'none'}"
    if message.get_content_charset("utf-8") not in UTF8_NAMES:
        return f"the Content-Type must have no charset but utf-8, got {value}"
    return None


def check_encoding(value: str) -> None:
    """Raises HTTPException 415 for a compressed body."""
    if value.lower() not in ("", "identity"):
        raise HTTPException(415, f"a body must be sent as it is, without a Content-Encoding, got {value}")


def check_query(items: Sequence[tuple[str, str]], known: Collection[str], whole: Collection[str]) -> None:
    """Raises InvalidRequest for a name that is unknown or there twice, or a number that is not written plainly.

    A misspelt name must not run with the default, nor one of two values be taken. `whole`: names of integers.
    """
    counts = Counter(name for name, _ in items)
    for name, value in items:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1, cutoff=HINT_CUTOFF)
            hint = f"; did you mean {close[0]}?" if close else ""
            message = f"unknown query parameter {quoted(name)}{hint}"
            raise InvalidRequest(message, param=name, code="unknown_parameter")
        if counts[name] > 1:
            raise InvalidRequest(f"{name} must be given once, got {counts[name]} values", param=name)
        if name in whole and not WHOLE_NUMBER.fullmatch(value):
            raise InvalidRequest(f"{name} must be an integer, got {quoted(value)}", param=name)
