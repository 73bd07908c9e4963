"""The lines of a batch's input file: requests, or what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nsm_core.errors import InvalidRequest
from service.schemas.batches import check_endpoint
from service.schemas.tuned_model import base_model
from service.web.errors import shown
from service.web.json_body import parse

MAX_LINES = 50_000
MAX_ERRORS = 100  # of a file, that are shown
MAX_ID_CHARS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class InputLine:
    """`number`: of the request in the file, from 0."""

    number: int
    custom_id: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The model that it names, also where it names a tuned state of it; "": none."""
        name = self.body.get("model")
        if not isinstance(name, str):
            return ""
        try:
            return base_model(name)
        except InvalidRequest:  # it ends with that error when it is run
            return name


@dataclasses.dataclass(frozen=True, slots=True)
class InputErrors:
    """Why a file, or a part of it, cannot be run, as a batch shows it."""

    errors: Sequence[dict[str, Any]]

    def to_object(self) -> dict[str, Any]:
        return {"object": "list", "data": list(self.errors)}


def first_endpoint(raw: bytes) -> str:
    """The `url` of the first request. Raises InvalidRequest, which names its line, or for a file without a request."""
    for number, line in enumerate(raw.splitlines(), start=1):
        if line.strip():
            try:
                value = parse(line)
                if not isinstance(value, dict):
                    raise InvalidRequest("a line must be a JSON object")
                return check_endpoint(value.get("url"))
            except InvalidRequest as error:
                raise InvalidRequest(f"line {number}: {error}", param=error.param) from error
    raise InvalidRequest("the input file must have at least 1 request")


def read_lines(raw: bytes, *, endpoint: str) -> list[InputLine] | InputErrors:
    """The requests of a file, in order. One wrong line is enough: then nothing of the file is run."""
    errors: list[dict[str, Any]] = []
    lines: list[InputLine] = []
    seen: set[str] = set()
    for line_number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            custom_id, body = _read_line(line, endpoint, seen)
        except InvalidRequest as error:
            errors.append(_error(error.code or "invalid_line", str(error), error.param, line_number))
            continue
        seen.add(custom_id)
        lines.append(InputLine(len(lines), custom_id, body))
    if not lines and not errors:
        errors.append(_error("empty_file", "the input file must have at least 1 request", None, None))
    if len(lines) > MAX_LINES:
        message = f"the input file must have at most {MAX_LINES} requests, got {len(lines)}"
        errors.append(_error("too_many_requests", message, None, None))
    return InputErrors(errors[:MAX_ERRORS]) if errors else lines


def _read_line(line: bytes, endpoint: str, seen: set[str]) -> tuple[str, dict[str, Any]]:
    value = parse(line)
    if not isinstance(value, dict):
        raise InvalidRequest("a line must be a JSON object")
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters, got {shown(custom_id)}"
        raise InvalidRequest(message, param="custom_id")
    if custom_id in seen:
        message = f"custom_id must be given once in the file, got {shown(custom_id)} again"
        raise InvalidRequest(message, param="custom_id", code="duplicate_custom_id")
    if method != "POST":
        raise InvalidRequest(f'method must be "POST", got {shown(method)}', param="method")
    if url != endpoint:
        message = f"url must be the batch's endpoint {endpoint!r}, got {shown(url)}"
        raise InvalidRequest(message, param="url", code="mismatched_endpoint")
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, got {shown(body)}", param="body")
    return custom_id, body


def _error(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def batch_error(code: str, message: str) -> InputErrors:
    """Of a batch, and of none of its lines."""
    return InputErrors([_error(code, message, None, None)])
