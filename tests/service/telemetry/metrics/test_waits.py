"""Whatever a client waits for after the server has read its first byte is in the metrics, under load, on every route.

A wait is measured here between two moments that surely lie within it, and a client's time between two that surely lie
around it: no result depends on speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway, until
from tests.support.raw_http import RawClient, connect, head

WAIT_S = 0.2
LATE = 60.0  # a test that waits so long has failed
FIRST_TOKEN = "nsm_time_to_first_token_seconds"
GAPS = "nsm_inter_token_latency_seconds"
WHOLE = "nsm_e2e_request_latency_seconds"
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/sessions/{}/generate": {"input": "x"},
}
NUM_STREAMS = 32


@dataclasses.dataclass(frozen=True)
class Asking:
    """Connections and the request of each: its head and its body."""

    server: Gateway
    backend: FakeBackend
    requests: list[tuple[RawClient, bytes, bytes]]

    async def send(self) -> None:
        for client, first, body in self.requests:
            await client.send(first + body)

    async def until_all_run(self) -> None:
        await until(lambda: len(self.backend.running) == len(self.requests))

    async def until_all_ended(self) -> None:
        """Reads every answer until the server closes."""
        for client, _, _ in self.requests:
            answer = await asyncio.wait_for(client.reader.read(), LATE)
            assert b"HTTP/1.1 200" in answer, answer
            assert b'"error":{' not in answer, answer


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    """As many streams as whole answers, of all routes; every token is held."""
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server, contextlib.AsyncExitStack() as stack:
        requests = []
        for number in range(NUM_STREAMS):
            path, text = list(TEXTS.items())[number % len(TEXTS)]
            if "{}" in path:
                assert (await server.client.post("/v1/sessions", json={"id": f"s{number}"})).status_code == 200
            body = json.dumps({**text, "stream": number % 8 < len(TEXTS)}).encode()
            fields = {"content-length": str(len(body)), "content-type": "application/json", "connection": "close"}
            client = await stack.enter_async_context(connect(server.url))
            requests.append((client, head("POST", path.format(f"s{number}"), fields), body))
        yield Asking(server, backend, requests)


async def wait(began: float) -> float:
    """Seconds that passed: many more than the work since `began` took, so that they stand out on any machine."""
    now = time.monotonic()
    await asyncio.sleep(max(WAIT_S, 4 * (now - began)))
    return time.monotonic() - now


async def wait_for_bodies(clients: Asking) -> float:
    began = time.monotonic()
    clients.backend.release_all()
    for client, first, _ in clients.requests:
        await client.send(first.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
    for client, _, _ in clients.requests:
        assert await client.status() == 100  # the server has read the head
    waited_s = await wait(began)
    for client, _, body in clients.requests:
        await client.send(body)
    return waited_s


async def wait_for_answers_before_it(clients: Asking) -> float:
    """The connection's first request waits for its token, and the second one for the first."""
    began = time.monotonic()
    for client, first, body in clients.requests:
        await client.send(first.replace(b"connection: close\r\n", b"") + body + first + body)
    await clients.until_all_run()
    waited_s = await wait(began)
    clients.backend.release_all()
    return 2 * waited_s


async def wait_for_the_first_token(clients: Asking) -> float:
    began = time.monotonic()
    await clients.send()
    await clients.until_all_run()
    waited_s = await wait(began)
    clients.backend.release_all()
    return waited_s


@pytest.mark.parametrize("wait_somewhere", [wait_for_bodies, wait_for_answers_before_it, wait_for_the_first_token])
async def test_X27_the_time_to_the_first_token_has_every_wait_of_all_streams(
    wait_somewhere: Callable[[Asking], Awaitable[float]],
) -> None:
    async with asking() as clients:
        began = time.monotonic()
        waited_s = await wait_somewhere(clients)
        await clients.until_all_ended()
        at_most_s = (time.monotonic() - began) * clients.server.metric(f"{WHOLE}_count")
        first_token_s, whole_s = (clients.server.metric(f"{name}_sum") for name in (FIRST_TOKEN, WHOLE))
        assert NUM_STREAMS * waited_s <= first_token_s <= whole_s <= at_most_s


async def test_X27_the_gaps_between_tokens_have_every_wait_of_all_streams() -> None:
    async with asking() as clients:
        began = time.monotonic()
        await clients.send()
        await clients.until_all_run()
        while clients.server.metric(f"{FIRST_TOKEN}_count") < NUM_STREAMS / 2:  # of the streams
            clients.backend.release()
            await asyncio.sleep(0.001)
        waited_s = await wait(began)
        clients.backend.release_all()
        await clients.until_all_ended()
        gaps_s, whole_s = (clients.server.metric(f"{name}_sum") for name in (GAPS, WHOLE))
        assert NUM_STREAMS / 2 * waited_s <= gaps_s <= whole_s <= (time.monotonic() - began) * NUM_STREAMS
