"""A gateway whose engine hangs in a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from nsm_core.engine import async_engine
from nsm_core.engine.engine import Engine, Events
from nsm_core.tokenizer import Tokenizer
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.models import local_backend

REQUEST_TIMEOUT_S = 4.0
CHAT = {"messages": [{"role": "user", "content": "x"}]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/sessions/one/generate", {"input": "x"}),
    ("/v1/responses", {"input": "x"}),
]
READING: list[tuple[str, dict[str, Any]]] = [  # their deadline is the setting's
    ("/v1/sessions/one/append", {"input": "x"}),
    ("/v1/states", {"name": "rules", "text": "x"}),
]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every step waits while it is clear."""
    opened, step = threading.Event(), Engine.step

    def wait_and_step(engine: Engine) -> Events:
        opened.wait()
        return step(engine)

    opened.set()
    monkeypatch.setattr(Engine, "step", wait_and_step)
    yield opened
    opened.set()


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer, gate: threading.Event) -> AsyncIterator[Gateway]:
    async with gateway(local_backend(tiny_tokenizer), is_live=True, request_timeout_s=REQUEST_TIMEOUT_S) as opened:
        await opened.client.post("/v1/sessions", json={"id": "one"})
        yield opened
        gate.set()


async def ask(server: Gateway, path: str, body: dict[str, Any]) -> Any:
    async with asyncio.timeout(60):
        is_sampling = path.endswith(("completions", "generate"))
        return await server.client.post(path, json={"ignore_eos": True, **body} if is_sampling else body)


async def wait_for_health(server: Gateway, status: int) -> None:
    async with asyncio.timeout(60):
        while (await server.client.get("/health/ready")).status_code != status:  # noqa: ASYNC110  # time makes it true
            await asyncio.sleep(0.05)


async def test_X15_deadlines_pass_on_every_route_while_a_step_hangs(server: Gateway, gate: threading.Event) -> None:
    gate.clear()
    calls = [call for call in CALLS if "responses" not in call[0]]  # those have no timeout of their own
    asked = [(path, {**body, "timeout": 0.5}) for path, body in calls]
    for group in (asked, READING):  # by turns: both have one of the session
        for answer in await asyncio.gather(*(ask(server, path, body) for path, body in group)):
            assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded"), answer.url
    gate.set()
    await wait_for_health(server, 200)
    for path, body in (*((path, {**body, "max_tokens": 2}) for path, body in calls), *READING):
        assert (await ask(server, path, body)).status_code == 200  # the session is free again, too


async def test_X15_new_requests_are_refused_at_once_while_a_step_hangs(
    server: Gateway, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.clear()
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 1.5)
    await wait_for_health(server, 503)
    for path, body in (*CALLS, *READING):
        answer = await ask(server, path, body)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_dead"), path
        assert int(answer.headers["retry-after"]) >= 1
    await server.client.get("/metrics")
    assert server.metric("nsm_engine_heartbeat_age_seconds") > 1.5
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 60.0)
    gate.set()
    assert (await ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})).status_code == 200
