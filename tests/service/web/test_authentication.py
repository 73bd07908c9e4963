"""Keys over HTTP."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from service.settings import Settings
from service.tenants.tenants import Tenants
from service.web.middleware import access_logger
from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway
from tests.support.tenants import StillClock, TestKey, keyed, make_key, write_keys

COMPLETIONS = "/v1/completions"
OPEN = [
    "/health",
    "/health/live",
    "/health/ready",
    "/docs",
    "/docs/assets/swagger-ui.css",
    "/openapi.json",
    "/",
    "/playground/app.js",
]
CLOSED = [
    "/v1/models",
    "/v1/sessions",
    "/metrics",
    "/v1/nothing",
    "/docs/",
    "/health/",
    "/openapi.json/x",
]
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


async def test_without_a_file_no_key_is_asked_for() -> None:
    async with gateway(FakeBackend()) as server:
        assert not server.services.tenants.has_keys
        for headers in ({}, {"authorization": "Bearer anything"}):
            response = await server.client.post(COMPLETIONS, json=BODY, headers=headers)
            assert response.status_code == 200
            assert not [name for name in response.headers if name.startswith("x-ratelimit")]
        assert (await server.client.get("/metrics")).status_code == 200


async def test_both_headers_carry_a_key(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="") as server:
        for headers in (
            {"authorization": f"Bearer {acme.text}"},
            {"authorization": f"bearer  {acme.text}"},
            {"x-api-key": acme.text},
            {"authorization": "Basic abc", "x-api-key": acme.text},
        ):
            assert (await server.client.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("kind", ["none", "unknown", "cut", "basic", "empty", "bare", "not ascii"])
async def test_without_a_valid_key_the_answer_is_401(
    keys_file: Path, acme: TestKey, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers: dict[str, dict[str, Any]] = {
        "none": {},
        "unknown": make_key("acme").headers,
        "cut": {"authorization": f"Bearer {acme.text[:-1]}"},
        "basic": {"authorization": f"Basic {acme.text}"},
        "empty": {"authorization": "Bearer "},
        "bare": {"authorization": acme.text},
        "not ascii": {"x-api-key": "nsm_é".encode("latin-1")},
    }
    backend = FakeBackend()
    with caplog.at_level(logging.DEBUG):
        async with keyed(keys_file, acme, backend=backend, acme="") as server:
            response = await server.client.post(COMPLETIONS, json=BODY, headers=headers[kind])
            rejected = server.metric("nsm_rejected_total", reason="invalid_api_key")
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == 'Bearer realm="nsm"'
    assert (backend.requests, rejected) == ([], 1)
    assert acme.secret[:20] not in response.text + caplog.text


async def test_health_and_documentation_are_open_and_all_else_is_closed(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="") as server:
        for path in OPEN:
            assert (await server.client.get(path)).status_code == 200, path
        assert (await server.client.get("/playground")).headers["location"] == "/"
        for path in CLOSED:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE"):
                assert (await server.client.request(method, path)).status_code == 401, (method, path)


async def test_every_documented_route_but_health_is_closed(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="") as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
        assert len(paths) > 10
        for path, operations in paths.items():
            for method, operation in operations.items():
                is_open = path.startswith("/health")
                assert ("security" in operation) is not is_open
                response = await server.client.request(method, path.replace("{", "").replace("}", ""))
                assert (response.status_code == 401) is not is_open, (method, path)


async def test_body_of_a_request_without_a_key_is_not_read(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="") as server:
        too_large = b"x" * (server.services.settings.max_body_bytes + 1)
        assert (await server.client.post(COMPLETIONS, content=too_large)).status_code == 401
        assert (await server.client.post(COMPLETIONS, content=too_large, headers=acme.headers)).status_code == 413


async def test_the_stock_client_gets_its_own_exceptions(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, is_live=True, acme="requests_per_s = 0.001\nburst = 1") as server:
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=acme.text, max_retries=0) as client:
            assert (await client.completions.create(model="fake-nsm", prompt="x", max_tokens=1)).choices[0].text == "It"
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="fake-nsm", prompt="x")
        async with openai.AsyncOpenAI(base_url=base, api_key="nsm_wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_keys_are_rotated_while_the_server_runs(keys_file: Path, acme: TestKey) -> None:
    new = make_key("acme")
    async with keyed(keys_file, acme, acme="") as server:
        clock = StillClock()
        keys = server.services.tenants._keys
        assert keys is not None
        keys._clock, keys._checked_at = clock, 0.0

        async def statuses() -> list[int]:
            clock.now += 1.0
            return [(await server.client.get("/v1/sessions", headers=key.headers)).status_code for key in (acme, new)]

        assert await statuses() == [200, 401]
        await server.client.post("/v1/sessions", json={"id": "mine"}, headers=acme.headers)
        write_keys(keys_file, acme, new, acme="")
        assert await statuses() == [200, 200]
        write_keys(keys_file, new, acme="")
        assert await statuses() == [401, 200]
        assert (await server.client.get("/v1/sessions/mine", headers=new.headers)).status_code == 200
        keys_file.write_text("[[keys")
        assert await statuses() == [401, 200]


async def test_metrics_are_for_keys_that_say_so(keys_file: Path, acme: TestKey) -> None:
    scraper = make_key("acme", metrics=True)
    async with keyed(keys_file, acme, scraper, acme="requests_per_s = 0.001\nburst = 1") as server:
        refused = await server.client.get("/metrics", headers=acme.headers)
        assert (refused.status_code, error_of(refused)["type"]) == (403, "permission_error")
        for _ in range(3):  # no limit of its tenant keeps a scraper out
            assert (await server.client.get("/metrics", headers=scraper.headers)).status_code == 200


async def test_no_key_is_in_logs_metrics_or_answers(
    keys_file: Path, acme: TestKey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, scraper = make_key("acme"), make_key("acme", metrics=True)
    said = ""
    with caplog.at_level(logging.DEBUG):
        async with keyed(keys_file, acme, scraper, acme="requests_per_s = 0.001\nburst = 2") as server:
            for key in (acme, stranger, acme, acme):
                response = await server.client.post(COMPLETIONS, json=BODY, headers=key.headers)
                said += response.text + str(response.headers)
            said += (await server.client.get("/metrics", headers=scraper.headers)).text
            said += repr(server.services)
    for key in (acme, stranger, scraper):
        assert key.secret not in said + caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name == access_logger.name]
    assert [line.endswith(f"tenant=acme key={acme.text.split('_')[1]}") for line in lines[:4]] == [
        True,
        False,
        True,
        True,
    ]


async def test_tenants_without_keys_are_one_tenant(keys_file: Path) -> None:
    settings = Settings(api_keys_file="~/keys.toml")
    assert settings.api_keys_file == Path.home() / "keys.toml"
    async with gateway(FakeBackend()) as server:
        tenants: Tenants = server.services.tenants
        assert tenants.take("default") is None
        permits = [tenants.enter("default", 1000) for _ in range(3)]
        for permit in permits * 2:
            permit.leave()
        assert tenants._running["default"] == 0
