"""What every answer tells browsers and caches, errors included; and that no page of another host reads any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway
from tests.support.tenants import TestKey, make_key, write_keys

ELSEWHERE = "https://elsewhere.example"
JSON = {"content-type": "application/json"}
# what is asked, and the status of the answer
ANSWERS: list[tuple[str, str, dict[str, Any], int]] = [
    ("GET", "/health", {}, 200),
    ("GET", "/v1/models", {}, 200),
    ("GET", "/openapi.json", {}, 200),
    ("GET", "/metrics", {}, 200),
    ("POST", "/v1/completions", {"json": {"prompt": "x"}}, 200),
    ("POST", "/v1/completions", {"json": {"prompt": "x", "stream": True}}, 200),
    ("POST", "/v1/completions", {"json": {"prompt": 5}}, 400),
    ("GET", "/v1/sessions", {"headers": {"authorization": "Bearer wrong"}}, 401),
    ("GET", "/nothing", {}, 404),
    ("GET", "/redoc", {}, 404),
    ("PUT", "/v1/sessions", {}, 405),
    ("POST", "/v1/completions", {"content": b"x" * 2000, "headers": JSON}, 413),
    ("POST", "/v1/completions", {"content": b"x"}, 415),
    ("POST", "/v1/sessions/broken/generate", {"json": {"input": "x"}}, 500),
]
PAGES = ["/", "/playground/app.js", "/docs"]


@pytest.fixture
def key() -> TestKey:
    return make_key("a", metrics=True)


@pytest.fixture
async def server(tmp_path: Path, key: TestKey) -> AsyncIterator[Gateway]:
    keys = write_keys(tmp_path / "keys.toml", key, a="")
    async with gateway(FakeBackend(), api_keys_file=keys, max_body_bytes=1000) as opened:
        yield opened


def break_sessions(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_args: object, **_fields: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(server.services.turns), "open_or_join", fail)


@pytest.mark.parametrize(("method", "path", "fields", "status"), ANSWERS)
async def test_answers_are_not_cached_and_run_no_script(
    server: Gateway,
    key: TestKey,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    fields: dict[str, Any],
    status: int,
) -> None:
    break_sessions(server, monkeypatch)
    origin = ELSEWHERE if method == "GET" else server.url  # pages of other hosts may not send anything
    headers = {**key.headers, "origin": origin, **fields.get("headers", {})}
    answer = await server.client.request(method, path, **{**fields, "headers": headers})
    assert answer.status_code == status
    check(answer)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


@pytest.mark.parametrize("path", PAGES)
async def test_pages_load_from_this_host_alone(server: Gateway, path: str) -> None:
    answer = await server.client.get(path, headers={"origin": ELSEWHERE})
    check(answer)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert (policy["frame-ancestors"], policy["object-src"], policy["base-uri"]) == ("'none'",) * 3
    assert "unsafe" not in policy.get("script-src", "")
    assert "//" not in answer.headers["content-security-policy"]  # no other host, by whatever scheme


async def test_a_page_of_another_host_may_not_ask(server: Gateway) -> None:
    """A browser asks first before it sends JSON or a key to another host, and is not told that it may."""
    asked = {"origin": ELSEWHERE, "access-control-request-method": "POST"}
    answer = await server.client.options("/v1/completions", headers=asked)
    assert answer.status_code in (401, 405)
    check(answer)


def check(answer: httpx.Response) -> None:
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not [name for name in answer.headers if name.startswith("access-control-")]
