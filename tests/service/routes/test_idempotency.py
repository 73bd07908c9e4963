"""Retries of a turn, over HTTP: done once, answered each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nsm_core.engine.request import NamedState
from nsm_core.errors import DeadlineExceeded, EngineDead, NsmError, NumericalError
from nsm_core.grammars.grammar import Grammar
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway

PATH = "/v1/sessions/s1/generate"
KEY = {"Idempotency-Key": "k1"}
BODY: dict[str, Any] = {"input": "x", "max_tokens": 6}


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend()) as made:
        await made.client.post("/v1/sessions", json={"id": "s1"})
        yield made


@pytest.fixture
async def held() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(hold=True)) as made:
        await made.client.post("/v1/sessions", json={"id": "s1"})
        yield made


def backend_of(server: Gateway) -> FakeBackend:
    assert isinstance(server.services.backend, FakeBackend)
    return server.services.backend


async def say(server: Gateway, headers: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    return await server.client.post(PATH, json={**BODY, **body}, headers=headers)


async def version_of(server: Gateway) -> int:
    return int((await server.client.get("/v1/sessions/s1")).json()["version"])


async def test_D9_a_retry_after_the_commit_gets_the_stored_result(server: Gateway) -> None:
    first = await say(server, logprobs=1)
    again = await say(server, logprobs=1)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert await version_of(server) == 1
    assert len(backend_of(server).requests) == 1
    assert server.metric("nsm_turn_replay_total") == 1
    assert (await say(server, {"Idempotency-Key": "k2"})).json()["session"]["version"] == 2
    assert (await say(server, logprobs=1)).json() == first.json()  # also when the session has moved on


async def test_D9_a_retry_is_framed_as_it_asks(server: Gateway) -> None:
    whole = (await say(server)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await say(server, **options)
    assert response.headers["idempotent-replayed"] == "true"
    frames = frames_of(response.text)
    assert "".join(frame["choices"][0]["text"] for frame in frames[:-1]) == whole["choices"][0]["text"]
    assert (frames[-2]["session"], frames[-1]["usage"]) == (whole["session"], whole["usage"])
    assert {frame["id"] for frame in frames} == {whole["id"]}
    again = await say(server, **options)
    assert again.text == response.text


async def test_D9_the_same_key_with_another_body_is_422_and_names_the_header(server: Gateway) -> None:
    assert (await say(server)).status_code == 200
    for change in ({"input": "y"}, {"temperature": 0.5}, {"max_tokens": 7}, {"expected_version": 1}):
        response = await say(server, **change)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (422, "idempotency_key_reused")
        assert "Idempotency-Key" in error["message"]
        assert response.headers["x-should-retry"] == "false"
    assert await version_of(server) == 1


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256])
async def test_a_key_that_cannot_be_is_refused(server: Gateway, key: str) -> None:
    response = await server.client.post(PATH, json=BODY, headers={b"Idempotency-Key": key.encode()})
    assert (response.status_code, error_of(response)["param"]) == (400, "Idempotency-Key")
    assert await version_of(server) == 0


async def test_D9_retries_at_once_run_the_turn_once(held: Gateway) -> None:
    first = asyncio.create_task(say(held))
    await backend_of(held).held.wait()
    storm = [asyncio.create_task(say(held)) for _ in range(8)]
    refused = await say(held, {"Idempotency-Key": "k2"})
    assert error_of(refused)["code"] == "session_busy"
    assert (await say(held, input="y")).status_code == 422
    backend_of(held).release_all()
    answers = [(await task).json() for task in (first, *storm)]
    assert answers == [answers[0]] * 9
    assert answers[0]["session"]["version"] == 1
    assert len(backend_of(held).requests) == 1


async def test_D9_without_a_key_session_and_version_tell_a_retry(server: Gateway) -> None:
    first = await say(server, {}, expected_version=0)
    again = await say(server, {}, expected_version=0)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    other = await say(server, {}, expected_version=0, input="y")
    assert error_of(other)["code"] == "version_conflict"
    assert (await say(server, {})).json()["session"]["version"] == 2  # neither key nor version: a turn of its own
    assert (await say(server, {})).json()["session"]["version"] == 3
    assert len(backend_of(server).requests) == 3


async def test_a_turn_that_was_cancelled_runs_again_for_its_retry(held: Gateway) -> None:
    first = asyncio.create_task(say(held))
    await backend_of(held).held.wait()
    assert (await held.client.post("/v1/sessions/s1/cancel")).json()["cancelled"] is True
    assert error_of(await first)["code"] == "turn_cancelled"
    backend_of(held).release_all()
    again = await say(held)
    assert again.json()["session"]["version"] == 1
    assert "idempotent-replayed" not in again.headers


@pytest.mark.parametrize(
    ("error", "status"), [(None, 409), (NumericalError("NaN"), 500), (DeadlineExceeded("too late"), 504)]
)
async def test_D9_a_key_stays_with_its_body_however_the_turn_ended(error: NsmError | None, status: int) -> None:
    """As for /v1/responses: the retry runs again, another body is 422 and does not take the key."""
    backend = FakeBackend(hold=True) if error is None else FakeBackend(fail_after=1, error=error)
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        first = asyncio.create_task(say(server))
        if error is None:
            await backend.held.wait()
            await server.client.post("/v1/sessions/s1/cancel")
        assert (await first).status_code == status
        other = await say(server, input="y")
        assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reused")
        backend.fail_after = None
        backend.release_all()
        again = await say(server)
        assert again.json()["session"]["version"] == 1
        assert (await say(server, input="y")).status_code == 422


async def test_what_was_refused_leaves_the_key_free(server: Gateway) -> None:
    response = await say(server, input="")
    assert response.status_code == 400
    assert (await say(server, input="")).status_code == 400
    assert (await say(server)).status_code == 200


class LeavingBackend(FakeBackend):
    """As an engine in another process that holds states; while it is away nothing of it can be had."""

    is_away = False

    def require_room(self) -> None:
        self._require_it()
        super().require_room()

    async def find_state(self, name: str) -> NamedState | None:
        self._require_it()
        return await super().find_state(name)

    def _require_it(self) -> None:
        if self.is_away:
            raise EngineDead("the engine's process is starting again")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_D9_a_committed_turn_is_answered_while_the_engine_is_away(*, is_stream: bool) -> None:
    backend = LeavingBackend(replays_exactly=True, holds_states=True)
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        first = await say(server, stream=is_stream)
        backend.is_away = True
        backend.states.lose()
        again = await say(server, stream=is_stream)
        assert (again.status_code, again.text) == (200, first.text)
        assert again.headers["idempotent-replayed"] == "true"
        assert (await say(server, input="y")).status_code == 422
        new = await say(server, {"Idempotency-Key": "k2"})
        assert (new.status_code, error_of(new)["code"]) == (503, "engine_dead")
        backend.is_away = False
        assert (await say(server, {"Idempotency-Key": "k2"})).json()["session"]["version"] == 2
        assert len(backend.requests) == 2


async def test_D9_a_committed_text_is_known_while_the_engine_is_away() -> None:
    backend, path = LeavingBackend(replays_exactly=True, holds_states=True), "/v1/sessions/s1/append"
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        first = await server.client.post(path, json={"input": "x"}, headers=KEY)
        backend.is_away = True
        again = await server.client.post(path, json={"input": "x"}, headers=KEY)
        assert (again.status_code, again.json()) == (200, first.json())
        assert again.headers["idempotent-replayed"] == "true"
        assert (await server.client.post(path, json={"input": "y"}, headers=KEY)).status_code == 422
        for headers in ({}, {"Idempotency-Key": "k2"}):
            assert (
                error_of(await server.client.post(path, json={"input": "x"}, headers=headers))["code"] == "engine_dead"
            )


async def test_D9_a_committed_turn_with_a_grammar_needs_no_engine_to_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = LeavingBackend(replays_exactly=True, holds_states=True)
    compile_grammar = backend.check_grammar

    async def check_grammar(grammar: Grammar) -> None:
        backend._require_it()
        await compile_grammar(grammar)

    monkeypatch.setattr(backend, "check_grammar", check_grammar)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}}
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        first = await say(server, **form)
        backend.is_away = True
        again = await say(server, **form)
        assert (again.status_code, again.text) == (200, first.text)
        assert again.headers["idempotent-replayed"] == "true"
        assert (await say(server, input="y", **form)).status_code == 422
        assert error_of(await say(server, {"Idempotency-Key": "k2"}, **form))["code"] == "engine_dead"
    assert len(backend.requests) == 1
