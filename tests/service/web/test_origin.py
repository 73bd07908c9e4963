"""Who may call a server that has no keys: by which name, and from which web pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from nsm_core.errors import ConfigError, StorageFull
from service.settings import load_settings
from service.web.origin import host_name
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.raw_http import connect
from tests.support.tenants import TestKey, make_key, write_keys

SESSIONS = "/v1/sessions"


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), host="gateway.lan", allowed_hosts="NSM.example, other.example") as opened:
        yield opened


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "app.localhost", "localhost.", "127.0.0.1:8000", "[::1]:8000"),
        *("10.1.2.3", "gateway.lan", "nsm.example:443", "other.example"),
    ],
)
async def test_X1_a_known_host_is_served(server: Gateway, host: str) -> None:
    assert (await server.client.get(SESSIONS, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "2130706433",
    ],
)
@pytest.mark.parametrize("path", [SESSIONS, "/", "/metrics", "/nowhere", "/openapi.json", "/health/live"])
async def test_X1_another_host_is_refused_on_every_path(server: Gateway, host: str, path: str) -> None:
    response = await server.client.get(path, headers={"host": host})
    assert response.status_code == 421
    error = error_of(response)
    assert error["code"] == "misdirected_request"
    assert "NSM_ALLOWED_HOSTS" in error["message"]


@pytest.mark.parametrize("host", ["", "a b", "user@localhost", "localhost/x", "localhost:port", "localhost?x", "[::1"])
async def test_X1_a_host_that_is_none_is_400(server: Gateway, host: str) -> None:
    response = await server.client.get(SESSIONS, headers={"host": host})
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_host"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /v1/sessions HTTP/1.1"], 400),
        (["GET /v1/sessions HTTP/1.1", "host: localhost", "host: localhost"], 400),
        (["GET /v1/sessions HTTP/1.1", "host: localhost", "host: evil.example"], 400),
        (["GET /v1/sessions HTTP/1.0"], 200),
    ],
)
async def test_X1_one_host_header_and_no_more(lines: list[str], status: int) -> None:
    async with gateway(FakeBackend(), is_live=True) as server, connect(server.url) as client:
        await client.send(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert await client.status() == status


async def test_X1_with_keys_or_a_star_any_host_is_served(tmp_path: Path) -> None:
    acme = make_key("acme")
    async with gateway(FakeBackend(), api_keys_file=write_keys(tmp_path / "keys.toml", acme, acme="")) as server:
        headers = {"host": "nsm.company.example", **acme.headers}
        assert (await server.client.get(SESSIONS, headers=headers)).status_code == 200
    async with gateway(FakeBackend(), allowed_hosts="*") as server:
        assert (await server.client.get(SESSIONS, headers={"host": "any.example"})).status_code == 200


PAGES_OF_OTHERS = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},  # the same site for a browser, but another program's page
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "file://"},
    {"origin": ""},
]
OWN = [
    {},
    {"origin": "http://localhost"},
    {"origin": "http://localhost:80"},
    {"origin": "http://LOCALHOST", "sec-fetch-site": "same-origin"},
    {"origin": "https://localhost"},  # behind a proxy that ends TLS
    {"sec-fetch-site": "none"},
    {"origin": "http://localhost:8080", "sec-fetch-site": "same-origin"},  # behind a proxy that drops the port
]
UNSAFE = [
    ("POST", SESSIONS),
    ("POST", "/v1/sessions/s1/fork"),
    ("POST", "/v1/sessions/s1/cancel"),
    ("POST", "/v1/sessions/import"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/completions"),
    ("POST", "/nowhere"),
    ("DELETE", "/v1/sessions/s1"),
    ("PATCH", "/v1/sessions/s1"),
]


@pytest.mark.parametrize("headers", PAGES_OF_OTHERS, ids=str)
@pytest.mark.parametrize(("method", "path"), UNSAFE)
async def test_X4_a_page_of_another_origin_changes_nothing(
    server: Gateway, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await server.client.request(method, path, headers=headers)
    assert response.status_code == 403
    assert error_of(response)["code"] == "cross_origin"
    assert (await server.client.get(SESSIONS)).json()["data"] == []


@pytest.mark.parametrize("headers", OWN, ids=str)
async def test_X4_programs_and_own_pages_may_write(server: Gateway, headers: dict[str, str]) -> None:
    assert (await server.client.post(SESSIONS, json={}, headers=headers)).status_code == 200


async def test_X4_allowed_origin_may_read_the_exposed_headers(server: Gateway) -> None:
    response = await server.client.get(SESSIONS, headers=PAGES_OF_OTHERS[0])
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data", "application/json"])
async def test_X4_a_file_has_a_type_that_no_form_can_send(server: Gateway, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    for path in ("/v1/sessions/import", "/v1/states/import?name=x"):
        response = await server.client.post(path, content=b"x", headers=headers)
        assert response.status_code == 415
        assert "application/octet-stream" in error_of(response)["message"]


async def test_a_page_of_a_named_origin_may_use_the_server() -> None:
    page = {"origin": "https://app.example"}
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with gateway(FakeBackend(), cors_origins="https://app.example,https://two.example") as server:
        asked = await server.client.request("OPTIONS", SESSIONS, headers={**page, **preflight})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        created = await server.client.post(SESSIONS, json={}, headers=page)
        assert created.status_code == 200
        assert created.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in created.headers["access-control-expose-headers"]
        other = await server.client.post(SESSIONS, json={}, headers={"origin": "https://evil.example"})
        assert other.status_code == 403


async def test_a_page_of_a_named_origin_may_read_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise StorageFull("the disk is full")

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    many, one = make_key("many"), make_key("one")
    limits = {"many": "requests_per_s = 1000\nburst = 1000", "one": "requests_per_s = 0.001\nburst = 1"}
    keys = write_keys(tmp_path / "keys.toml", many, one, **limits)
    backend = FakeBackend()
    page = {"origin": "https://app.example", "content-type": "application/json"}
    answers: dict[str, httpx.Response] = {}
    async with gateway(backend, api_keys_file=keys, cors_origins="https://app.example", max_body_bytes=1000) as server:

        async def ask(name: str, method: str, path: str, content: str = "", key: TestKey | None = many) -> None:
            headers = {**page, **({} if key is None else key.headers)}
            answers[name] = await server.client.request(method, path, content=content, headers=headers)

        await ask("200", "POST", SESSIONS, '{"id": "s1"}')
        await ask("200 stream", "POST", "/v1/completions", '{"prompt": "x", "max_tokens": 2, "stream": true}')
        await ask("400 json", "POST", "/v1/completions", "{")
        await ask("400 field", "POST", "/v1/completions", '{"promt": "x"}')
        await ask("401", "GET", SESSIONS, key=None)
        await ask("404 session", "GET", f"{SESSIONS}/none")
        await ask("404 path", "GET", "/nowhere")
        await ask("405", "PUT", SESSIONS)
        await ask("409", "POST", f"{SESSIONS}/s1/generate", '{"input": "x", "expected_version": 7}')
        await ask("413", "POST", SESSIONS, "x" * 1001)
        await ask("415", "POST", SESSIONS + "/import", "x")
        await ask("200 first", "GET", SESSIONS, key=one)
        await ask("429", "GET", SESSIONS, key=one)
        monkeypatch.setattr(server.services.store, "create", refuse)
        await ask("507", "POST", SESSIONS, '{"id": "s2"}')
        monkeypatch.setattr(server.services.store, "create", fail)
        await ask("500", "POST", SESSIONS, '{"id": "s2"}')
        backend.is_full = True
        await ask("503", "POST", "/v1/completions", '{"prompt": "x"}')
    for name, answer in answers.items():
        assert str(answer.status_code) == name[:3]
        assert answer.headers["access-control-allow-origin"] == page["origin"], name
        assert answer.headers["vary"] == "Origin", name
        assert "retry-after" in answer.headers["access-control-expose-headers"], name
        assert ("x-ratelimit-limit-requests" in answer.headers) == (name not in ("401", "413")), name


@pytest.mark.parametrize(
    "value",
    [
        "app.example",
        "ftp://app.example",
        "https://app.example/",
        "https://a.example,x",
        "https://",
        "https://App.example",
        "https://app.example:443",
        "https://app.example:port",
        "https://me@app.example",
        "https://*.example",
        "http://[::1",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(ConfigError, match="NSM_CORS_ORIGINS"):
        load_settings(cors_origins=value)


@pytest.mark.parametrize(
    "value", ["*", "http://localhost:3000,https://app.example", "http://[::1]:3000", "http://a:443"]
)
def test_an_origin_that_browsers_send_is_taken(value: str) -> None:
    assert load_settings(cors_origins=value).cors_origins == value


@pytest.mark.parametrize(
    ("value", "name"), [("A.example:80", "a.example"), ("[::1]", "::1"), ("a.", "a"), (".", None), (":80", None)]
)
def test_a_host_header_has_a_name_and_perhaps_a_port(value: str, name: str | None) -> None:
    assert host_name(value) == name


async def test_errors_of_the_server_have_the_usual_headers(server: Gateway) -> None:
    response: httpx.Response = await server.client.get(SESSIONS, headers={"host": "evil.example"})
    assert response.headers["x-request-id"]
    assert response.headers["content-security-policy"]
