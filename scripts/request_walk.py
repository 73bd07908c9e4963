#!/usr/bin/env python3
"""How far a request travels through the code: files passed, calls, moves between files and store trips of three walks.

    .venv/bin/python scripts/request_walk.py [--json]

Walks: a completion, a session's turn, and a response with `previous_response_id`. Each runs in this process, with the
bundled model, the eager executor, one thread and an SQLite store. The figures are those of the shortest of five rounds,
each after a warm-up. Only functions of `service` and `nsm_core` count; a generator or coroutine counts when it starts,
not when it resumes. A move is a call from one file into another. A store trip is one operation on sessions or records,
counted in a second run with traces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import dis
import functools
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
import torch  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from nsm_core.config import EngineConfig  # noqa: E402
from nsm_core.model.loader import load_checkpoint  # noqa: E402
from service.app import create_app  # noqa: E402
from service.backends.local import LocalBackend  # noqa: E402
from service.settings import Settings  # noqa: E402
from service.stores.sessions.factory import make_store  # noqa: E402
from service.telemetry.tracing.tracing import Tracing  # noqa: E402

PACKAGES = tuple(str(ROOT / name) + "/" for name in ("service", "nsm_core"))
STORE_SPANS = ("store ", "records ")
ROUNDS = 5
NUM_TOKENS = 2  # few, so that the step's share stays small
TEXT = "It was a dark and stormy night; "

Ask = Callable[[], Awaitable[httpx.Response]]
Walk = Callable[[httpx.AsyncClient], Awaitable[Ask]]


@dataclasses.dataclass(slots=True)
class Count:
    """Calls by file, and calls from one file into another."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    entries: Counter[str] = dataclasses.field(default_factory=Counter)

    def profile(self, frame: FrameType, event: str) -> None:
        """Takes an event of `sys.setprofile`."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGES) or is_resumed(frame) or is_inline(frame):
            return
        self.calls[file] += 1
        if caller_file(frame) != file:
            self.entries[file] += 1


def is_inline(frame: FrameType) -> bool:
    """Whether the function is a comprehension, which is a part of its caller."""
    return frame.f_code.co_name.endswith("comp>")


def is_resumed(frame: FrameType) -> bool:
    """Whether a generator or coroutine resumes rather than starts."""
    return frame.f_lasti > first_resume(frame.f_code)


@functools.cache
def first_resume(code: CodeType) -> int:
    """Where the body of a function begins, in bytes."""
    return next(item.offset for item in dis.get_instructions(code) if item.opname == "RESUME")


def caller_file(frame: FrameType) -> str | None:
    """The file of the nearest caller in the packages."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
        caller = caller.f_back
    return None if caller is None else caller.f_code.co_filename


async def completion(client: httpx.AsyncClient) -> Ask:
    async def ask() -> httpx.Response:
        return await client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": NUM_TOKENS})

    await ask()
    return ask


async def session_turn(client: httpx.AsyncClient) -> Ask:
    session_id = (await client.post("/v1/sessions", json={})).json()["id"]

    async def ask() -> httpx.Response:
        body = {"input": TEXT, "max_tokens": NUM_TOKENS}
        return await client.post(f"/v1/sessions/{session_id}/generate", json=body)

    await ask()
    return ask


async def chained_response(client: httpx.AsyncClient) -> Ask:
    async def ask(previous: str | None) -> httpx.Response:
        body = {"input": TEXT, "max_output_tokens": NUM_TOKENS, "previous_response_id": previous}
        return await client.post("/v1/responses", json=body)

    first = (await ask(None)).json()["id"]
    second = (await ask(first)).json()["id"]
    return functools.partial(ask, second)


WALKS: dict[str, Walk] = {
    "/v1/completions": completion,
    "a session's turn": session_turn,
    "/v1/responses with previous_response_id": chained_response,
}


@contextlib.asynccontextmanager
async def opened(backend: LocalBackend, tracing: Tracing | None = None) -> AsyncIterator[httpx.AsyncClient]:
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(store=f"sqlite:///{directory}/sessions.db")
        app = create_app(settings, backend, make_store(settings), tracing=tracing)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
        ):
            yield client


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Counts in this thread and in the engine's, which runs already: a flag tells both when."""
    count = Count()
    COUNTS.append(count)
    try:
        yield count
    finally:
        COUNTS.remove(count)


COUNTS: list[Count] = []


def profile(frame: FrameType, event: str, argument: object) -> None:
    for count in COUNTS:
        count.profile(frame, event)


async def calls_of(walk: Walk, backend: LocalBackend) -> Count:
    """The shortest of several rounds: a slow one has more pauses, and so more calls."""
    counts = []
    async with opened(backend) as client:
        for _ in range(ROUNDS):
            ask = await walk(client)
            with counting() as count:
                answer = await ask()
            answer.raise_for_status()
            counts.append(count)
    return min(counts, key=lambda count: count.calls.total())


async def trips_of(walk: Walk, backend: LocalBackend) -> Counter[str]:
    """The smallest number of several rounds: a slow turn stores its tokens more often."""
    spans = InMemorySpanExporter()
    async with opened(backend, Tracing(SimpleSpanProcessor(spans))) as client:
        rounds = []
        for _ in range(ROUNDS):
            ask = await walk(client)
            spans.clear()
            (await ask()).raise_for_status()
            names = [span.name for span in spans.get_finished_spans()]
            rounds.append(Counter(name for name in names if name.startswith(STORE_SPANS)))
    return min(rounds, key=Counter.total)


def row_of(walk: Walk) -> dict[str, Any]:
    """One row of the table, with the details of --json."""
    count = asyncio.run(calls_of(walk, make_backend()))
    trips = asyncio.run(trips_of(walk, make_backend()))
    return {
        "files": len(count.calls),
        "calls": count.calls.total(),
        "moves": count.entries.total(),
        "trips": trips.total(),
        "by_file": {str(Path(file).relative_to(ROOT)): number for file, number in count.calls.most_common()},
        "entries": {str(Path(file).relative_to(ROOT)): number for file, number in count.entries.most_common()},
        "by_trip": dict(trips),
    }


def make_backend() -> LocalBackend:
    return LocalBackend(load_checkpoint(None), EngineConfig(), executor="eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print calls and entries of every file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    threading.setprofile(profile)  # before the engine starts its thread
    sys.setprofile(profile)
    rows = {name: row_of(walk) for name, walk in WALKS.items()}
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("| request | files passed | calls | moves between files | store trips |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        print(f"| {name} | {row['files']} | {row['calls']:,} | {row['moves']:,} | {row['trips']} |")


if __name__ == "__main__":
    main()
