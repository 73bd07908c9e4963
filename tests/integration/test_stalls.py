"""No body within the limits holds up the event loop, on which every stream and the health check run.

The bodies come from the API's own description: every list as long as a body may be, every object with as many members,
every text as long, deep nesting, and bodies as large that are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from service.app import create_app
from service.schemas.common import MAX_MESSAGES
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore
from service.web.connection import connection_class
from tests.support.fakes import FakeBackend

MAX_STALL_S = 0.2  # of processor time: other programs of the machine do not count
MAX_BODY_BYTES = Settings().max_body_bytes
DEPTH = 3  # levels of a schema that get bodies of their own
Schema = dict[str, Any]


class Watched:
    """A server on a thread of its own; `stall_s` is the longest that its event loop was held up since `reset`."""

    def __init__(self) -> None:
        self.app = create_app(Settings(max_body_bytes=MAX_BODY_BYTES), FakeBackend(), SqliteSessionStore(None))
        fields = {"http": connection_class(30.0), "lifespan": "on", "log_config": None}
        self.server = uvicorn.Server(uvicorn.Config(self.app, host="127.0.0.1", port=0, **fields))
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self.started = threading.Event()
        self.stall_s = 0.0
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        ticking = asyncio.create_task(self._tick())
        await self.server.serve()
        ticking.cancel()

    async def _tick(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.stall_s = max(self.stall_s, now - before)
            before = now
            if self.server.started:
                self.started.set()

    def __enter__(self) -> Watched:
        self.thread.start()
        assert self.started.wait(30)
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        self.client = httpx.Client(base_url=f"http://{host}:{port}", timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(30)

    def stall_of(self, method: str, path: str, raw: bytes) -> tuple[int, float]:
        """The status, and the longest stall while the body was worked on: the least of three tries, since processor
        time grows too while other programs share the core.
        """
        status, stall_s = self._once(method, path, raw)
        for _ in range(2):
            if stall_s <= MAX_STALL_S:
                break
            status, again_s = self._once(method, path, raw)
            stall_s = min(stall_s, again_s)
        return status, stall_s

    def _once(self, method: str, path: str, raw: bytes) -> tuple[int, float]:
        self.stall_s = 0.0
        response = self.client.request(method, path, content=raw, headers={"content-type": "application/json"})
        self.client.get("/health/live")
        return response.status_code, self.stall_s


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


def operations() -> list[tuple[str, str, Schema, Schema]]:
    """Method, path, the body's schema and the components, of each operation with a JSON body."""
    described = create_app(Settings(), FakeBackend(), SqliteSessionStore(None)).openapi()
    found = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is not None:
                found.append((method.upper(), path, content["schema"], described["components"]["schemas"]))
    return found


def resolved(schema: Schema, components: Schema) -> list[Schema]:
    """The alternatives of a schema, without references."""
    if "$ref" in schema:
        return resolved(components[schema["$ref"].rsplit("/", 1)[1]], components)
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return [schema] if not parts else [one for part in parts for one in resolved(part, components)]


def smallest(schema: Schema, components: Schema) -> Any:
    """A small value that fits."""
    one = next((part for part in resolved(schema, components) if part.get("type") != "null"), {})
    if "const" in one or "enum" in one:
        return one["const"] if "const" in one else one["enum"][0]
    if one.get("type") == "object":
        return {name: smallest(one["properties"][name], components) for name in one.get("required", ())}
    if one.get("type") == "array":
        return [smallest(one.get("items", {}), components)] * one.get("minItems", 1)
    return {"integer": 1, "number": 1, "boolean": True}.get(one.get("type", ""), "x")


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
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", LONGEST)
def test_X2_long_bodies_that_are_right_stall_nobody(server: Watched, path: str) -> None:
    server.stall_of("POST", path, b"{}")  # the first request of a route builds what later ones use
    server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    for body in LONGEST[path]:
        status, stall_s = server.stall_of("POST", path, orjson.dumps(body))
        assert status in (200, 400)
        assert stall_s <= MAX_STALL_S, (status, str(body)[:80])
