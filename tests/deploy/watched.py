"""A server under some load, watched by Prometheus: whatever the dashboards show happens at least once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from service.cli.scrape import Scrape
from tests.deploy.absent_hardware import absent_hardware
from tests.support.prometheus_server import Prometheus, prometheus
from tests.support.server_processes import Server, running
from tests.support.tenants import TestKey, make_key, write_keys

LOAD_S = 5.0  # of several scrapes
NUM_ROUNDS = 4  # of each client at least, however slow the machine
WAIT_S = 120.0
# The last that is recorded of a scrape: one rule that reads another one.
RECORDED_LAST = "instance:nsm_energy_joules_per_generated_token:ratio_rate5m"
STORY = "It was the best of times, it was the worst of times, and nobody knew in the least what would come of it. " * 3


@dataclasses.dataclass(frozen=True, slots=True)
class Watched:
    """What became of it. Queries are asked `at` a time (Unix seconds) at which the server was still there."""

    prometheus: Prometheus
    at: float
    last: Scrape  # what the server itself said at that time, when nothing happened any more

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        return self.prometheus.query(expr, at=self.at)


@contextlib.contextmanager
def watched(model: Path, directory: Path, store: str) -> Iterator[Watched]:
    """The load has passed and the server has stopped; Prometheus is there to be asked."""
    keys = {name: make_key(name) for name in ("acme", "slow")}
    reader = make_key("ops", metrics=True)
    limits = {"acme": "max_sessions = 100", "slow": "requests_per_s = 0.01\nburst = 1", "ops": ""}
    file = write_keys(directory / "keys.toml", *keys.values(), reader, **limits)
    settings = {"MODEL": model, "NUM_THREADS": 1, "API_KEYS_FILE": file, "STORE": store}
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(absent_hardware())

        async def run() -> Watched:
            async with running(settings, directory / "data") as server:
                address = server.client.base_url.netloc.decode()
                jobs = {"nsm": [address], "triton": [fake]}
                watcher = stack.enter_context(prometheus(directory, jobs, reader.text))
                await has_seen(watcher, "up", since=0.0)
                await load(server, keys)
                await has_seen(watcher, RECORDED_LAST, since=time.time())
                answer = await server.client.get("/metrics", headers=reader.headers)
                return Watched(watcher, time.time(), Scrape(answer.text, time.monotonic()))

        yield asyncio.run(run())


async def has_seen(watcher: Prometheus, metric: str, *, since: float) -> None:
    """Prometheus read both targets a second after `since` (Unix seconds), and has such a sample of the metric."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        now = time.time()
        is_up = [value for _, value in watcher.query("up", at=now)] == [1.0, 1.0]
        at = [value for _, value in watcher.query(f"timestamp(up) or timestamp({metric})", at=now)]
        if is_up and min(at) > since + 1 and watcher.query(metric, at=now):
            return
        await asyncio.sleep(0.1)  # nothing tells when Prometheus has read its targets
    raise RuntimeError(f"Prometheus has not seen {metric} in {WAIT_S:g} s")


async def load(server: Server, keys: dict[str, TestKey]) -> None:
    """Several clients side by side, each with its habit, for LOAD_S seconds or NUM_ROUNDS rounds."""
    client = server.client
    client.headers.update(keys["acme"].headers)
    slow = keys["slow"].headers
    habits: list[Callable[[int], Awaitable[None]]] = [
        lambda number: _converse(client, f"session-{number}"),
        lambda number: _stream(client, STORY[: 40 + 10 * (number % 5)]),
        lambda number: _stream(client, STORY),
        lambda number: _fail(client, slow),
    ]
    end = time.monotonic() + LOAD_S
    async with asyncio.TaskGroup() as clients:
        for habit in habits:
            clients.create_task(_repeat(habit, end))


async def _repeat(habit: Callable[[int], Awaitable[None]], end: float) -> None:
    for number in itertools.count():
        if number >= NUM_ROUNDS and time.monotonic() > end:
            return
        await habit(number)
        await asyncio.sleep(0.05)


async def _converse(client: httpx.AsyncClient, session_id: str) -> None:
    """Two turns, and a retry of the second; it gets the same answer."""
    await _ok(client.post("/v1/sessions", json={"id": session_id}))
    path, body = f"/v1/sessions/{session_id}/generate", {"input": " Who are you?", "max_tokens": 8, "ignore_eos": True}
    await _ok(client.post(path, json=body))
    key = {"Idempotency-Key": session_id}
    for _ in range(2):
        await _ok(client.post(path, json=body, headers=key))


async def _stream(client: httpx.AsyncClient, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        async for _ in stream.aiter_lines():
            pass


async def _fail(client: httpx.AsyncClient, slow: dict[str, str]) -> None:
    """Somebody without a key, somebody over a limit, and a session that is not there."""
    answers = [
        await client.get("/v1/models", headers={"authorization": "Bearer nobody"}),
        *[await client.get("/v1/models", headers=slow) for _ in range(2)],
        await client.post("/v1/sessions/none/generate", json={"input": "x"}),
    ]
    assert [answers[0].status_code, *(answer.status_code for answer in answers[2:])] == [401, 429, 404]


async def _ok(request: Awaitable[httpx.Response]) -> dict[str, Any]:
    response = await request
    assert response.status_code == 200, response.text
    return dict(response.json())
