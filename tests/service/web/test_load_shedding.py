"""Refusals while the engine has no room: at once, and before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import EngineDead
from service.web.load_shedding import GENERATING
from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway
from tests.support.raw_http import connect, head
from tests.support.tenants import make_key, write_keys

COMPLETION: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
TURN: dict[str, Any] = {"input": "x", "max_tokens": 3}
S1 = "/v1/sessions/s1/generate"


@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_without_room_a_body_is_not_even_read(path: str) -> None:
    backend = FakeBackend()
    backend.is_full = True
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        await client.send(head("POST", path, {"content-length": "1000", "content-type": "application/json"}))
        answer = await client.read_until(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b"overloaded" in await client.read_until(b"}}")
        labels = {"method": "POST", "route": path, "status": "503"}
        assert server.metric("nsm_http_requests_total", **labels) == 1
        assert server.metric("nsm_errors_total", code="overloaded") == 1


async def test_the_connection_of_a_refusal_serves_the_next_request() -> None:
    backend = FakeBackend()
    async with gateway(backend, is_live=True) as server, connect(server.url) as client:
        for is_full, status in ((True, 503), (True, 503), (False, 200)):
            backend.is_full = is_full
            await client.post("/v1/completions", COMPLETION)
            assert await client.status() == status
            await client.read_until(b"}}" if is_full else b"}}}")


async def test_without_room_a_turn_leaves_its_session_alone() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        backend.is_full = True
        refused = await server.client.post(S1, json=TURN)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
        assert server.metric("nsm_lease_wait_seconds_count") == 0
        backend.is_full = False
        assert (await server.client.post(S1, json=TURN)).json()["session"]["version"] == 1


@pytest.mark.parametrize("path", ["/v1/completions", S1, "/v1/sessions/import"])
async def test_with_little_memory_left_new_work_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    is_low = True
    monkeypatch.setattr("service.web.load_shedding.MemoryWatch.is_low", lambda self: is_low)
    async with gateway(FakeBackend()) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        refused = await server.client.post(path, json={})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
        assert "memory" in error_of(refused)["message"]
        assert (await server.client.get("/v1/sessions/s1")).status_code == 200
        is_low = False
        assert (await server.client.post(S1, json=TURN)).status_code == 200


async def test_request_without_need_of_the_engine_is_answered() -> None:
    backend = FakeBackend()
    backend.is_full = True
    async with gateway(backend) as server:
        assert (await server.client.post("/v1/sessions", json={"id": "s1"})).status_code == 200
        assert (await server.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        assert (await server.client.get("/v1/completions")).status_code == 405


async def test_D9_a_retry_gets_its_answer_without_room() -> None:
    backend, key = FakeBackend(), {"Idempotency-Key": "k1"}
    response = {"input": "x", "max_output_tokens": 3}
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        (S1, TURN, key),
        (S1, {**TURN, "expected_version": 1}, {}),
        ("/v1/responses", response, key),
    ]
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        first = [(await server.client.post(path, json=body, headers=fields)).json() for path, body, fields in asked]
        backend.is_full = True
        again = [(await server.client.post(path, json=body, headers=fields)).json() for path, body, fields in asked]
        assert again == first
        new = await server.client.post("/v1/responses", json=response, headers={"Idempotency-Key": "k2"})
        assert new.status_code == 503


async def test_missing_key_is_reported_before_a_full_engine(tmp_path: Path) -> None:
    acme = make_key("acme")
    write_keys(tmp_path / "keys.toml", acme, acme="")
    backend = FakeBackend()
    backend.is_full = True
    async with gateway(backend, api_keys_file=tmp_path / "keys.toml") as server:
        assert (await server.client.post("/v1/completions", json=COMPLETION)).status_code == 401
        headers = acme.headers
        assert (await server.client.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 503


async def test_a_dead_engine_refuses_as_early(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()

    def die() -> None:
        raise EngineDead("the engine failed")

    monkeypatch.setattr(backend, "require_room", die)
    async with gateway(backend) as server:
        refused = await server.client.post("/v1/completions", content=b"no JSON")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_dead")
