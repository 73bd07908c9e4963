"""Bodies that are no JSON, or none that is taken: a 4xx that says so; nothing of it disturbs the next request."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.routes.refusals import assert_refused
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.samples import json_parsing_cases, utf8_byte_cases

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), max_prompt_tokens=1000, max_body_bytes=100_000) as opened:
        yield opened


async def test_invalid_utf8_is_refused(server: Gateway) -> None:
    cases = [raw for raw, _ in utf8_byte_cases()]
    for raw in cases:
        response = await server.client.post(COMPLETIONS, content=b'{"prompt": "' + raw + b'"}', headers=JSON)
        if _is_utf8(raw):
            assert response.status_code in (200, 400)  # control characters must be escaped in JSON
        else:
            assert response.status_code == 400, raw
            assert error_of(response)["code"] == "invalid_json"
            assert error_of(response)["message"].endswith("is not UTF-8")
    assert sum(not _is_utf8(raw) for raw in cases) == 72


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(
    "raw",
    [
        b"NaN",
        b'{"prompt": [1, Infinity]}',
        b'{"prompt": "Hi", "temperature": Nan}',
        b'{"prompt": "temperature": NaN}',
        b"-1e999",
        b'{"prompt": "\\ud800"}',
        '{"prompt": "x"}'.encode("utf-16"),
        '{"prompt": "x"}'.encode("utf-32"),
    ],
)
async def test_invalid_json_is_reported_as_such(server: Gateway, raw: bytes) -> None:
    response = await server.client.post(COMPLETIONS, content=raw, headers=JSON)
    error = await assert_refused(server, response, 400, ["not valid JSON"])
    assert (error["param"], error["code"]) == (None, "invalid_json")


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"prompt": "Hi", "temperature": NaN}', "temperature"),
        (b'{"prompt": "Hi", "top_p" :\n-Infinity}', "top_p"),
        (b'{"prompt": "Hi", "logit_bias": {"5": 1e999}}', "5"),
        (b'{"prompt": "Hi", "\\"min\\u005fp": NaN}', '"min_p'),
    ],
)
async def test_a_number_that_is_not_finite_is_refused_by_name(server: Gateway, raw: bytes, name: str) -> None:
    response = await server.client.post(COMPLETIONS, content=raw, headers=JSON)
    error = await assert_refused(server, response, 400, ["not valid JSON", f"{name}' must be a finite number"])
    assert (error["param"], error["code"]) == (name, "invalid_json")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/sessions/s1/generate"])
async def test_json_parsing_suite(server: Gateway, path: str) -> None:
    """None of these is a body of ours: what is JSON fails as a body, what is not fails as JSON; nothing crashes."""
    for name, raw in json_parsing_cases().items():
        response = await server.client.post(path, content=raw, headers=JSON)
        error = error_of(response)
        if name.startswith("n_"):
            assert response.status_code in ((400,) if len(raw) <= 100_000 else (413,)), name
            assert error["code"] in ("invalid_json", "body_too_large"), name
        else:
            assert 400 <= response.status_code < 500, name
            assert name.startswith("i_") or error["code"] != "invalid_json", name


@pytest.mark.parametrize(
    "raw", [b"[" * 50_000, b'{"prompt":' * 9_000, b'{"logit_bias":' + b"[" * 1000 + b"]" * 1000 + b"}"]
)
async def test_deep_nesting_does_not_crash(server: Gateway, raw: bytes) -> None:
    response = await server.client.post(COMPLETIONS, content=raw, headers=JSON)
    await assert_refused(server, response, 400, [])


async def test_a_body_that_is_nested_too_deeply_is_told_so(server: Gateway) -> None:
    raw = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"
    response = await server.client.post(COMPLETIONS, content=raw, headers=JSON)
    error = await assert_refused(server, response, 400, ["nested too deeply", "1024 levels"])
    assert error["code"] == "invalid_json"


MESSAGE = b'{"role": "user", "content": "x"'
DEEP = b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 300 + b'{"b": 1, "b": 1}' + b"}" * 301


@pytest.mark.parametrize(
    ("path", "raw", "name"),
    [
        (COMPLETIONS, b'{"prompt": "x", "prompt": "y"}', "prompt"),
        (COMPLETIONS, b'{"prompt": "x", "\\u0070rompt"\n:\t"x"}', "prompt"),
        (COMPLETIONS, b'{"prompt": "\\u003a", "seed": 1, "seed": 2}', "seed"),  # as many colons as in one reading
        (COMPLETIONS, DEEP, "b"),
        (COMPLETIONS, b'{"prompt": "' + b"x" * 40_000 + b'", "seed": 1, "seed": 1}', "seed"),  # read on a thread
        (CHAT, b'{"messages": [' + MESSAGE + b', "content": "y"}]}', "content"),
        ("/v1/responses", b'{"input": "x", "store": false, "store": true}', "store"),
    ],
)
async def test_a_repeated_name_is_refused_by_name(server: Gateway, path: str, raw: bytes, name: str) -> None:
    response = await server.client.post(path, content=raw, headers=JSON)
    error = await assert_refused(server, response, 400, [name, "given once"])
    assert error["param"] == name


@pytest.mark.parametrize(
    "text", [rb"\"a\": 1, \"a\": 2", rb"\u003a \u003A", rb"{\"a\":\\", b"::", rb"\\", "é: ü".encode()]
)
async def test_names_within_texts_and_in_other_objects_are_not_repeated(server: Gateway, text: bytes) -> None:
    messages = b",".join([MESSAGE + b"}", b'{"role": "user", "content": "' + text + b'"}'])
    response = await server.client.post(
        CHAT, content=b'{"max_tokens": 2, "messages": [' + messages + b"]}", headers=JSON
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/json; charset=UTF8", 200),
        ("application/json; charset=us-ascii", 200),
        ("application/vnd.api+json", 200),
        ("application/json; charset=iso-8859-1", 415),
        ("application/json; charset=utf-16", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        (None, 415),
    ],
)
async def test_only_json_is_taken(server: Gateway, content_type: str | None, status: int) -> None:
    """A web page can post a form to a local server, but no JSON."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = await server.client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == status
    if status != 200:
        assert error_of(response)["code"] == "unsupported_media_type"


async def test_a_compressed_body_is_refused(server: Gateway) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    response = await server.client.post(COMPLETIONS, content=b"\x1f\x8b\x08", headers=headers)
    error = await assert_refused(server, response, 415, ["Content-Encoding", "got gzip"])
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("raw", "words"), [(b"", ["body is required"]), (b"[]", ["object", "[]"]), (b"null", []), (b'"x"', ["object"])]
)
async def test_a_body_must_be_an_object(server: Gateway, raw: bytes, words: list[str]) -> None:
    await assert_refused(server, await server.client.post(COMPLETIONS, content=raw, headers=JSON), 400, words)


def routes_without_body(server: Gateway) -> list[tuple[str, str]]:
    """Method and path of those that change something and describe no body."""
    paths = server.app.openapi()["paths"]
    return [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, operations in paths.items()
        for method, operation in operations.items()
        if method in ("post", "delete", "put", "patch") and "requestBody" not in operation
    ]


async def test_a_route_without_a_body_refuses_one_with_fields(server: Gateway) -> None:
    routes = routes_without_body(server)
    assert {("POST", "/v1/sessions/session_id/cancel"), ("DELETE", "/v1/sessions/session_id")} <= set(routes)
    assert len(routes) >= 10
    large = b'{"x": "' + b"y" * 40_000 + b'"}'
    for method, path in routes:
        for raw, code, param in (
            (b'{"x": 1}', "unknown_parameter", "x"),
            (b'{"y": null, "x": []}', "unknown_parameter", "x"),
            (large, "unknown_parameter", "x"),
            (b"{bad", "invalid_json", None),
            (b"[1]", None, None),
        ):
            response = await server.client.request(method, path, content=raw, headers=JSON)
            error = error_of(response)
            assert (response.status_code, error["code"], error["param"]) == (400, code, param), (method, path, raw[:9])
            assert param is None or "unknown field 'x'" in error["message"]
        assert (await server.client.request(method, path, content=b'{"x": 1}')).status_code == 415


@pytest.mark.parametrize("raw", [b"", b"{}", b" {} ", b"null", b'{"x": null}'])
async def test_a_route_without_a_body_takes_an_empty_one(server: Gateway, raw: bytes) -> None:
    path = "/v1/sessions/s1"
    await server.client.post("/v1/sessions", json={"id": "s1"})
    for method, at in (("POST", f"{path}/cancel"), ("DELETE", path)):
        response = await server.client.request(method, at, content=raw, headers=JSON)
        assert response.status_code == 200, response.text
