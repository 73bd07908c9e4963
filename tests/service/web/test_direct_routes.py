"""A route that is called directly answers as the framework's router makes it answer."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Match

from service.app import ROUTES
from service.web.direct_routes import RouteDirectly
from service.web.json_body import JsonRoute
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway

ALL = [route for module in ROUTES for route in module.router.routes]
JSON = {"content-type": "application/json"}
REQUESTS: list[tuple[str, str, bytes, dict[str, str]]] = [
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 2, "seed": 1}', JSON),
    ("POST", "/v1/completions", b'{"max_tokens": "2"}', JSON),
    ("POST", "/v1/completions", b'{"prompt": "x", "promt": "y"}', JSON),
    ("POST", "/v1/completions", b'{"prompt": "x", "seed": 123456789012345678901234567890}', JSON),
    ("POST", "/v1/completions", b"[]", JSON),
    ("POST", "/v1/completions", b"{", JSON),
    ("POST", "/v1/completions", b"", JSON),
    ("POST", "/v1/completions", b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}),
    ("POST", "/v1/completions?n=2", b'{"prompt": "x"}', JSON),
    ("POST", "/v1/sessions", b"", {}),
    ("POST", "/v1/sessions", b'{"ttl": 3}', JSON),
    ("POST", "/v1/sessions/none/generate", b'{"input": "x"}', JSON),
    ("POST", "/v1/sessions/none/generate", b'{"input": 1}', {**JSON, "idempotency-key": "a b"}),
    ("POST", "/v1/sessions/no%20id/generate", b'{"input": 1}', JSON),
    ("GET", "/v1/sessions?limit=0&after=x", b"", {}),
    ("GET", "/v1/sessions?limit=x", b"", {}),
    ("GET", "/v1/sessions/", b"", {}),
    ("GET", "/v1/models/a/b", b"", {}),
    ("PUT", "/v1/sessions/none", b"", {}),
    ("HEAD", "/v1/sessions", b"", {}),
    ("POST", "/v1/sessions/none/rewind", b'{"to": -1}', JSON),
    ("POST", "/v1/nothing", b"{}", JSON),
]


def scope_of(method: str, path: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": []}


def example_path(route: JsonRoute) -> str:
    return route.path_format.format_map({name: f"some-{name}" for name in route.param_convertors})


@pytest.mark.parametrize(("method", "path", "body", "headers"), REQUESTS)
async def test_an_answer_is_that_of_the_router(
    method: str, path: str, body: bytes, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"x-request-id": "same", **headers}
    answers = []
    for is_direct in (True, False):
        if not is_direct:
            monkeypatch.setattr(RouteDirectly, "_find", lambda *_: None)
        async with gateway(FakeBackend()) as server:
            answer = await server.client.request(method, path, content=body, headers=headers)
            fields = answer.json() if answer.content else {}
            for changing in ("id", "created", "created_at", "expires_at", "updated_at"):
                fields.pop(changing, None)
            answers.append((answer.status_code, fields, sorted(set(answer.headers) - {"content-length"})))
    assert answers[0] == answers[1]


def test_each_route_is_found_that_the_router_would_find() -> None:
    direct = RouteDirectly(None, ALL)  # type: ignore[arg-type]  # nothing is answered
    num_found = 0
    for route in ALL:
        for method in sorted(route.methods if isinstance(route, JsonRoute) else ()):
            scope = scope_of(method, example_path(route))
            first = next(one for one in ALL if one.matches(dict(scope))[0] is Match.FULL)
            found = direct._find(scope)
            num_found += found is not None
            assert found in (first, None)
            assert (found is None) == (":path" in route.path)
    assert num_found > 50


def test_every_endpoint_is_called_without_the_framework() -> None:
    assert [route.path for route in ALL if isinstance(route, JsonRoute) and route.direct is None] == []
