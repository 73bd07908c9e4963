"""A server on a thread of its own whose event loop is watched, and values that fit the schemas of its description."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn

from service.app import create_app
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore
from service.web.connection import connection_class
from tests.support.fakes import FakeBackend

MAX_STALL_S = 0.2  # of processor time, on a processor that needs `REFERENCE_S` for the reference work
REFERENCE_ADDITIONS = 200_000
REFERENCE_S = 0.02
MAX_BODY_BYTES = Settings().max_body_bytes
Schema = dict[str, Any]


class Watched:
    """A server on a thread of its own; `stall_s` is the longest that its event loop was held up since `reset`."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.app = create_app(Settings(max_body_bytes=MAX_BODY_BYTES), self.backend, SqliteSessionStore(None))
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
        gc.collect()
        gc.freeze()  # as a server does; what earlier tests left would make each look for garbage a stall
        self.thread.start()
        assert self.started.wait(60)
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        self.client = httpx.Client(base_url=f"http://{host}:{port}", timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)

    def stall_of(self, method: str, path: str, raw: bytes) -> tuple[int, float]:
        """The status, and the longest stall while the body was worked on: see `least_stall`."""
        statuses = []

        def once() -> float:
            status, stall_s = self._once(method, path, raw)
            statuses.append(status)
            return stall_s

        stall_s = least_stall(once)
        return statuses[-1], stall_s

    def _once(self, method: str, path: str, raw: bytes) -> tuple[int, float]:
        self.stall_s = 0.0
        response = self.client.request(method, path, content=raw, headers={"content-type": "application/json"})
        self.client.get("/health/live")
        return response.status_code, self.stall_s


def least_stall(once: Callable[[], float]) -> float:
    """The least stall of up to five tries, each by the speed that the processor had at that moment.

    A real stall comes again; one that other programs on the core caused does not.
    """
    least_s = math.inf
    for _ in range(5):
        stall_s = once()
        least_s = min(least_s, stall_s if stall_s <= MAX_STALL_S else stall_s / slowness())
        if least_s <= MAX_STALL_S:
            break
    return least_s


def slowness() -> float:
    """How many times as long as `REFERENCE_S` the reference work takes now; at least 1."""
    before = time.process_time()
    total = 0
    for number in range(REFERENCE_ADDITIONS):
        total += number
    return max(1.0, (time.process_time() - before) / REFERENCE_S)


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
