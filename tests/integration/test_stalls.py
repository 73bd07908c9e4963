"""No body within the limits holds up the event loop, on which every stream and the health check run.

The bodies come from the API's own description: every list as long as a body may be, every object with as many members,
every text as long, deep nesting, and bodies as large that are right.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from service.schemas.common import MAX_MESSAGES
from tests.support.watched_server import (
    MAX_BODY_BYTES,
    MAX_STALL_S,
    Schema,
    Watched,
    operations,
    resolved,
    smallest,
)

DEPTH = 3  # levels of a schema that get bodies of their own


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


def largest(schema: Schema, components: Schema, depth: int) -> Iterator[Any]:
    """Values as large as a body: one for each kind of growth at each place."""
    room = MAX_BODY_BYTES - 2_000
    for one in resolved(schema, components):
        kind = one.get("type")
        if kind == "string" or kind is None:
            yield "x" * room
            yield "é," * (room // 3)
        if kind == "array" or kind is None:
            element = smallest(one.get("items", {}), components)
            yield [element] * (room // (len(orjson.dumps(element)) + 1))
            yield [[]] * (room // 3)
            if depth > 0 and kind is not None:
                yield from ([value] for value in largest(one["items"], components, depth - 1))
        if kind == "object" or kind is None:
            yield {f"{number:06}": 1 for number in range(room // 11)}
            properties = one.get("properties", {})
            for name, part in properties.items() if depth > 0 else ():
                for value in largest(part, components, depth - 1):
                    yield {**smallest(one, components), name: value}


def bodies(schema: Schema, components: Schema) -> Iterator[bytes]:
    """Large bodies, each within the limit."""
    for value in largest(schema, components, DEPTH):
        raw = orjson.dumps(value)
        if 100_000 < len(raw) <= MAX_BODY_BYTES:
            yield raw
    half = MAX_BODY_BYTES // 2 - 1
    yield b"[" * half + b"]" * half
    yield b'{"prompt":' * 600_000 + b"1" + b"}" * 600_000
    yield b'["' + b'\\"' * half + b'"]'
    yield b"1" * MAX_BODY_BYTES
    yield b'{"seed":' + b"9" * (MAX_BODY_BYTES - 9) + b"}"


def path_of(path: str) -> str:
    return path.replace("{session_id}", "s1").replace("{", "").replace("}", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "path", "schema", "components"), operations(), ids=lambda value: str(value)[:40])
def test_X2_no_body_stalls_the_event_loop(
    server: Watched, method: str, path: str, schema: Schema, components: Schema
) -> None:
    server.client.post("/v1/sessions", json={"id": "s1"})
    stalls = {}
    for raw in bodies(schema, components):
        status, stall_s = server.stall_of(method, path_of(path), raw)
        assert status < 500 or status == 503
        stalls[raw[:60] + b"..." + raw[-20:]] = stall_s
    slow = {start: stall_s for start, stall_s in stalls.items() if stall_s > MAX_STALL_S}
    assert stalls
    assert slow == {}


MESSAGE = {"role": "user", "content": "x"}
LONGEST = {
    "/v1/completions": [{"prompt": [5] * 131_000, "max_tokens": 1}, {"prompt": ["x"] * 200_000, "max_tokens": 1}],
    "/v1/chat/completions": [{"messages": [MESSAGE] * count, "max_tokens": 1} for count in (MAX_MESSAGES, 37_000)],
    "/v1/responses": [{"input": [MESSAGE] * count, "max_output_tokens": 1} for count in (MAX_MESSAGES, 37_000)],
    "/v1/responses/input_tokens": [{"input": [MESSAGE] * MAX_MESSAGES}],
    "/tokenize": [{"messages": [MESSAGE] * MAX_MESSAGES}, {"prompt": "word " * 1_000_000}],
    "/detokenize": [{"tokens": [5] * 1_000_000}],
    "/v1/conversations": [{"items": [{"type": "message", **MESSAGE}] * 20}],
    "/v1/sessions/s1/generate": [
        {"input": [5] * 131_000, "max_tokens": 1},
        {"input": [5] * 1_000_000},
        {"input": "word " * 1_000_000},
    ],
    "/v1/sessions/s1/append": [{"input": "word " * 1_000_000}, {"input": [5] * 1_000_000}],
    "/v1/states": [
        {"name": "rules", "text": "word " * 1_000_000},
        {"name": "rules", "messages": [MESSAGE] * MAX_MESSAGES},
        {"name": "rules", "file": base64.b64encode(bytes(6_000_000)).decode()},
    ],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", LONGEST)
def test_X2_long_bodies_that_are_right_stall_nobody(server: Watched, path: str) -> None:
    server.client.post("/v1/sessions", json={"id": "s1"})
    server.stall_of("POST", path, b"{}")  # the first request of a route builds what later ones use
    server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    for body in LONGEST[path]:
        status, stall_s = server.stall_of("POST", path, orjson.dumps(body))
        assert status in (200, 400)
        assert stall_s <= MAX_STALL_S, (status, str(body)[:80])
