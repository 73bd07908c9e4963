"""A gateway on real Triton servers: what becomes of its sessions when a server hangs, dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import DeadlineExceeded, EngineDead
from service.backends.triton.backend import TritonBackend
from service.backends.triton.probe import ask_worker
from service.stores.sessions.base import SessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.integration.test_triton_failures import is_alive
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.raw_http import connect
from tests.support.slow_steps import slow_steps
from tests.support.triton_servers import RunningTriton, TritonClient, eventually, running_triton, wait_until

pytestmark = pytest.mark.triton

NUM_SESSIONS, LONG = 3, 300
MANY = 30_000  # tokens
BODY: dict[str, Any] = {"input": "Once", "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
NOTICED_S = 60.0  # after a worker was killed


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[RunningTriton]:
    with running_triton(tmp_path_factory.mktemp("victim"), tiny_model_dir) as server:
        yield server


@pytest.fixture
def victim(victims: RunningTriton) -> RunningTriton:
    """A server to be stopped and killed."""
    if not victims.is_running:
        victims.start()
    return victims


@contextlib.asynccontextmanager
async def on(*servers: RunningTriton, store: SessionStore | None = None) -> AsyncIterator[Gateway]:
    backend = TritonBackend([server.grpc_url for server in servers], wait_s=120)
    async with gateway(backend, is_live=True, store=store) as opened:
        yield opened


def failovers(server: Gateway) -> float:
    return server.metric("nsm_triton_failovers_total")


async def say(server: Gateway, session_id: str, **body: Any) -> dict[str, Any]:
    answer = await server.client.post(f"/v1/sessions/{session_id}/generate", json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def stream(server: Gateway, session_id: str, begun: asyncio.Event, **body: Any) -> tuple[str, list[str]]:
    """The text and the tokens of a turn. `begun` is set when some of it has come."""
    lines = []
    path, fields = f"/v1/sessions/{session_id}/generate", {**BODY, **body, "stream": True}
    async with server.client.stream("POST", path, json=fields) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if len(lines) > 30:
                begun.set()
    pieces = [choice for frame in frames_of("\n".join(lines) + "\n") for choice in frame["choices"]]
    tokens = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
    return "".join(piece["text"] for piece in pieces), tokens


async def turns_while(server: Gateway, calm: Gateway, kind: str, killing: Callable[[], Awaitable[None]]) -> int:
    """Turns of several sessions lose a server in their midst; they and the next are what they are where it is calm.

    That is on another gateway, as equal sessions have one state, which has one place. Returns how many of the turns
    under way had to go on elsewhere.
    """
    names = [f"{kind}{number}" for number in range(NUM_SESSIONS)]
    want = []
    for number, name in enumerate(names):
        for one in (server, calm):
            await one.client.post("/v1/sessions", json={"id": name})
            await say(one, name, seed=number)
        whole = (await say(calm, name, max_tokens=LONG))["choices"][0]
        want.append((whole["text"], whole["logprobs"]["tokens"]))
    begun = [asyncio.Event() for _ in names]
    with slow_steps():
        turns = [
            asyncio.create_task(stream(server, name, event, max_tokens=LONG))
            for name, event in zip(names, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        num_before = failovers(server)
        await killing()
    assert await asyncio.gather(*turns) == want
    num_broken = failovers(server) - num_before
    for name in names:
        got, expected = [await say(one, name, max_tokens=9) for one in (server, calm)]
        assert got["choices"][0]["text"] == expected["choices"][0]["text"]
        assert (got["usage"], got["session"]) == (expected["usage"], expected["session"])
    return num_broken


async def test_T2_sessions_go_on_elsewhere_when_a_worker_dies_and_triton_hides_it(
    triton: RunningTriton, victim: RunningTriton
) -> None:
    """Without its supervisor, Triton says that all is well and its streams just stop; heartbeats tell otherwise."""
    async with on(victim, triton) as both, on(triton) as calm, on(victim) as alone:
        assert (await alone.client.get("/health/ready")).status_code == 200

        async def kill() -> None:
            victim.process.send_signal(signal.SIGSTOP)
            os.kill(victim.stub_pid, signal.SIGKILL)
            async with asyncio.timeout(NOTICED_S):
                while await is_ready(alone):  # noqa: ASYNC110  # nobody in another process sets an event
                    await asyncio.sleep(0.02)

        await turns_while(both, calm, "hidden", kill)
        assert failovers(both) > 0
        assert (await both.client.get("/health/ready")).status_code == 200
        refused = await alone.client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_dead")

        server_pid = victim.server_pid
        victim.kill()
        await asyncio.to_thread(wait_until, lambda: not is_alive(server_pid), "the end of the server")
        await asyncio.to_thread(victim.start)
        await eventually(lambda: is_ready(alone))
        await eventually(lambda: all_are_up(both))
        answer = await alone.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3

        async def kill_server() -> None:
            victim.kill()

        num_failovers = failovers(both)
        await turns_while(both, calm, "killed", kill_server)
        assert failovers(both) > num_failovers


async def test_T5_any_server_serves_any_session(triton: RunningTriton, victim: RunningTriton) -> None:
    """Nothing of Triton's ties a session to an instance: its turns go from server to server and back, by gateways that
    have one server each and one store together, and read like those of a session that stayed.
    """
    async with httpx.AsyncClient(base_url=triton.http_url, timeout=60.0) as http:
        config = (await http.get("/v2/models/nsm/config")).json()
    assert "sequence_batching" not in config
    store = SqliteSessionStore(None)
    async with on(triton) as calm, on(triton, store=store) as here, on(victim, store=store) as there:
        for server in (calm, here):
            await server.client.post("/v1/sessions", json={"id": "s"})
        for number, server in enumerate((here, there, there, here, there)):
            got, want = [await say(one, "s", seed=number) for one in (server, calm)]
            assert got["choices"] == want["choices"]
            assert (got["usage"], got["session"]["position"]) == (want["usage"], want["session"]["position"])
        assert (there.metric("nsm_triton_state_misses_total"), here.metric("nsm_triton_failovers_total")) == (2, 0)


async def test_T7_a_server_that_is_told_to_stop_breaks_no_stream(triton: RunningTriton, victim: RunningTriton) -> None:
    """Its readiness is off at once, what runs on it ends there, and no session stays busy."""
    async with on(victim, triton) as both, on(triton) as calm:

        async def stop() -> None:
            victim.process.send_signal(signal.SIGTERM)
            with pytest.raises((EngineDead, DeadlineExceeded)):
                while True:
                    await ask_worker("readiness", victim.grpc_url, timeout_s=NOTICED_S)

        assert await turns_while(both, calm, "stopped", stop) == 0
        assert (await both.client.get("/health/ready")).status_code == 200
    # 70: Triton lost an answer while it stopped, and the worker ended itself
    assert await asyncio.to_thread(victim.process.wait, 60) in (0, 70)


async def all_are_up(server: Gateway) -> bool:
    return server.metric("nsm_triton_servers", state="down") == 0


async def is_ready(server: Gateway) -> bool:
    return (await server.client.get("/health/ready")).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_S6_T4_the_worker_stops_when_the_client_leaves(triton: RunningTriton, is_stream: bool) -> None:
    async with on(triton) as server, TritonClient(triton) as worker, connect(server.url) as client:

        async def is_running(number: int) -> bool:
            return (await worker.status()).engine.num_running == number

        num_before = (await worker.status()).engine.tokens_generated
        body = {"prompt": "x", "stream": is_stream, "max_tokens": MANY, "ignore_eos": True}
        with slow_steps():
            await client.post("/v1/completions", body)
            await eventually(lambda: is_running(1))
            client.leave()
        await eventually(lambda: is_running(0))
        assert (await worker.status()).engine.tokens_generated - num_before < MANY


async def test_S8_a_cancelled_turn_leaves_the_session_where_it_was(triton: RunningTriton) -> None:
    async with on(triton) as server:
        await server.client.post("/v1/sessions", json={"id": "s"})
        before = (await say(server, "s", max_tokens=5))["session"]
        begun = asyncio.Event()
        turn = asyncio.create_task(stream(server, "s", begun, max_tokens=30_000))
        await begun.wait()
        after = (await server.client.post("/v1/sessions/s/cancel")).json()
        assert (after["version"], after["position"]) == (before["version"], before["position"])
        with pytest.raises(Exception, match="choices"):  # the last frame tells an error
            await turn


async def test_R6_a_session_that_comes_back_moves_no_state(triton: RunningTriton) -> None:
    async with on(triton) as server, TritonClient(triton) as worker:
        before = (await worker.status()).states
        await server.client.post("/v1/sessions", json={"id": "s"})
        for _ in range(3):
            await say(server, "s", max_tokens=5)
        states = (await worker.status()).states
        assert (states.num_hits - before.num_hits, states.num_misses - before.num_misses) == (2, 0)
        assert server.metric("nsm_triton_state_hits_total") == 2
        assert server.metric("nsm_triton_state_misses_total") == 0


def test_a_gateway_on_triton_needs_no_torch() -> None:
    code = "import sys, service.server, service.backends.triton.backend; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
