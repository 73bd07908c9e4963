"""L6: another tenant's ids do not exist, on any route that the server documents."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.tenants import TestKey, make_key, write_keys

ACME, RIVAL = make_key("acme"), make_key("rival")
SECRET = "the password is swordfish"
PUBLIC = {"/v1/models/{model_id}"}  # ids that belong to nobody
BODIES: dict[str, Any] = {"/v1/sessions/{session_id}/rewind": {"to_position": 0}}  # what their schemas cannot say
STORE_CALLS = [
    name for name in vars(SqliteSessionStore) if not name.startswith("_") and name not in ("open", "close", "check")
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Acme has a session `theirs` with a turn in it; rival has nothing."""
    path = write_keys(tmp_path / "keys.toml", ACME, RIVAL, acme="", rival="")
    async with gateway(FakeBackend(), api_keys_file=path) as made:
        await ask(made, ACME, "POST", "/v1/sessions", {"id": "theirs", "metadata": {"note": SECRET}})
        await ask(made, ACME, "POST", "/v1/sessions/theirs/generate", {"input": SECRET, "max_tokens": 2})
        yield made


async def ask(server: Gateway, key: TestKey, method: str, path: str, body: Any = None) -> httpx.Response:
    return await server.client.request(method, path, json=body, headers=key.headers)


def routes_with_ids(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(method, path template, a smallest valid body or None) of every operation on something that has an owner."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "{" in path and path not in PUBLIC:
                content = operation.get("requestBody", {}).get("content", {}).get("application/json")
                body = smallest(content["schema"], document) if content else None
                yield method.upper(), path, BODIES.get(path, body)


def smallest(schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """A value that fits: required fields only."""
    if "$ref" in schema:
        return smallest(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    for choice in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        return smallest(choice, document)
    if schema.get("type") == "object":
        return {name: smallest(schema["properties"][name], document) for name in schema.get("required", ())}
    return {"string": "x", "integer": 0, "number": 1.0, "boolean": False, "array": []}[schema["type"]]


def fill(template: str, value: str) -> str:
    before, _, rest = template.partition("{")
    return before if not rest else before + value + fill(rest.partition("}")[2], value)


async def test_L6_every_route_answers_404_for_anothers_id_as_for_one_that_never_was(server: Gateway) -> None:
    document = (await server.client.get("/openapi.json")).json()
    before = await snapshot_of(server)
    seen = list(routes_with_ids(document))
    assert {path for _, path, _ in seen} >= {"/v1/sessions/{session_id}", "/v1/sessions/{session_id}/generate"}
    for method, template, body in seen:
        foreign, unknown = [
            await ask(server, RIVAL, method, fill(template, name), body) for name in ("theirs", "unborn")
        ]
        assert (foreign.status_code, unknown.status_code) == (404, 404), (method, template, foreign.text)
        assert foreign.text.replace("theirs", "unborn") == unknown.text
        assert SECRET not in foreign.text
        assert set(foreign.headers) == set(unknown.headers)
        assert error_of(foreign)["type"] == "not_found_error"
    assert await snapshot_of(server) == before


async def snapshot_of(server: Gateway) -> tuple[Any, ...]:
    """All that is stored of acme's session."""
    store, key = server.services.store, SessionKey("acme", "theirs")
    return (await store.load(key), await store.read_log(key), await store.log_marks(key))


async def test_L6_anothers_id_and_an_unknown_one_take_the_same_path(server: Gateway) -> None:
    """Nothing is looked up for the one that is not for the other, so their times tell nothing."""
    document = (await server.client.get("/openapi.json")).json()
    for method, template, body in routes_with_ids(document):
        walks = []
        for name in ("theirs", "unborn"):
            with recorded(server) as calls:
                await ask(server, RIVAL, method, fill(template, name), body)
            walks.append([(call, tenant) for call, tenant in calls])
        assert walks[0] == walks[1], (method, template)
        assert {tenant for _, tenant in walks[0]} <= {"rival"}


@contextlib.contextmanager
def recorded(server: Gateway) -> Iterator[list[tuple[str, str | None]]]:
    """The calls to the store, each with its tenant."""
    calls: list[tuple[str, str | None]] = []
    store: Any = server.services.store
    originals = {name: getattr(store, name) for name in STORE_CALLS}

    def record(name: str) -> Any:
        async def call(*args: Any, **fields: Any) -> Any:
            calls.append((name, args[0].tenant if args else fields.get("tenant")))
            return await originals[name](*args, **fields)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in STORE_CALLS:
            patch.setattr(store, name, record(name))
        yield calls


async def test_L6_no_field_and_no_header_widens_a_tenant(server: Gateway) -> None:
    for field in ("tenant", "tenant_id", "organization", "api_key"):
        for path, body in (
            ("/v1/sessions", {}),
            ("/v1/sessions/theirs/generate", {"input": "x"}),
            ("/v1/completions", {"prompt": "x"}),
        ):
            refused = await ask(server, RIVAL, "POST", path, {**body, field: "acme"})
            assert (refused.status_code, error_of(refused)["param"]) == (400, field)
    for header in ("x-tenant", "x-tenant-id", "openai-organization", "x-forwarded-user", "cookie"):
        response = await server.client.get("/v1/sessions/theirs", headers={**RIVAL.headers, header: "acme"})
        assert response.status_code == 404
    query = await server.client.get("/v1/sessions?tenant=acme", headers=RIVAL.headers)
    assert (query.status_code, error_of(query)["param"]) == (400, "tenant")


async def test_L6_each_tenant_lists_its_own_and_names_are_free(server: Gateway) -> None:
    own = await ask(server, RIVAL, "POST", "/v1/sessions", {"id": "theirs"})
    assert own.status_code == 200  # a conflict would tell that it exists
    assert own.json()["version"] == 0
    listed = [(await ask(server, key, "GET", "/v1/sessions")).json()["data"] for key in (ACME, RIVAL)]
    assert [[(session["id"], session["version"]) for session in data] for data in listed] == [
        [("theirs", 1)],
        [("theirs", 0)],
    ]
    assert (await ask(server, RIVAL, "DELETE", "/v1/sessions/theirs")).status_code == 200
    assert (await ask(server, ACME, "GET", "/v1/sessions/theirs")).json()["version"] == 1


async def test_L6_a_cursor_of_another_tenant_shows_nothing_of_it(server: Gateway) -> None:
    for number in range(3):
        await ask(server, ACME, "POST", "/v1/sessions", {"id": f"s{number}"})
    page = (await ask(server, ACME, "GET", "/v1/sessions?limit=1")).json()
    foreign = await ask(server, RIVAL, "GET", f"/v1/sessions?after={page['next_cursor']}")
    assert (foreign.status_code, foreign.json()["data"]) == (200, [])


async def test_L6_cancel_and_delete_do_not_reach_anothers_running_turn(tmp_path: Path) -> None:
    backend = FakeBackend(hold=True)
    path = write_keys(tmp_path / "keys.toml", ACME, RIVAL, acme="", rival="")
    async with gateway(backend, is_live=True, api_keys_file=path) as server:
        await ask(server, ACME, "POST", "/v1/sessions", {"id": "s1"})
        body = {"input": "x", "stream": True, "max_tokens": 1}
        async with server.client.stream("POST", "/v1/sessions/s1/generate", json=body, headers=ACME.headers) as stream:
            for method, tail in (("POST", "/cancel"), ("DELETE", "")):
                assert (await ask(server, RIVAL, method, f"/v1/sessions/s1{tail}")).status_code == 404
            busy = await ask(server, ACME, "POST", "/v1/sessions/s1/generate", body)
            foreign = await ask(server, RIVAL, "POST", "/v1/sessions/s1/generate", body)
            assert (busy.status_code, foreign.status_code) == (409, 404)
            assert len(backend.running) == 1
            backend.release_all()
            assert '"finish_reason":"length"' in (await stream.aread()).decode()


async def test_L6_another_tenants_stream_does_not_exist(server: Gateway) -> None:
    turn = await ask(server, ACME, "POST", "/v1/sessions/theirs/generate", {"input": SECRET, "max_tokens": 2})
    path = f"/v1/streams/{turn.json()['id']}"
    refused = await ask(server, RIVAL, "GET", path)
    unknown = await ask(server, ACME, "GET", path.replace("-theirs", "-nobody"))
    assert (refused.status_code, unknown.status_code) == (404, 404)
    assert error_of(refused)["message"] == error_of(unknown)["message"].replace("-nobody", "-theirs")
    assert (await ask(server, ACME, "GET", path)).status_code == 200
