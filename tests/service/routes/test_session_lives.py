"""Changing, forking and expiring sessions over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.stored_sessions import Clock


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend()) as made:
        yield made


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


async def create(server: Gateway, session_id: str = "s1", **body: Any) -> dict[str, Any]:
    return ok(await server.client.post("/v1/sessions", json={"id": session_id, **body}))


async def say(server: Gateway, session_id: str, text: str | list[int], max_tokens: int = 4) -> dict[str, Any]:
    body = {"input": text, "max_tokens": max_tokens}
    return ok(await server.client.post(f"/v1/sessions/{session_id}/generate", json=body))


async def fork(server: Gateway, session_id: str = "s1", **body: Any) -> dict[str, Any]:
    return ok(await server.client.post(f"/v1/sessions/{session_id}/fork", json=body))


async def patch(server: Gateway, **body: Any) -> httpx.Response:
    return await server.client.patch("/v1/sessions/s1", json=body)


async def log_of(server: Gateway, session_id: str) -> tuple[int, ...]:
    return await server.services.store.read_log(SessionKey("default", session_id))


async def test_metadata_and_ttl_are_changed_and_what_is_absent_stays(server: Gateway) -> None:
    await create(server, metadata={"a": "1"}, ttl_s=60)
    session = ok(await patch(server, metadata={"b": "2"}))
    assert (session["metadata"], session["ttl_s"], session["version"]) == ({"b": "2"}, 60, 0)
    session = ok(await patch(server, ttl_s=90.5))
    assert (session["metadata"], session["ttl_s"]) == ({"b": "2"}, 90.5)
    session = ok(await patch(server, ttl_s=None))
    assert (session["metadata"], session["ttl_s"], session["expires_at"]) == ({"b": "2"}, None, None)
    session = ok(await patch(server, metadata={}))
    assert session["metadata"] == {}
    assert ok(await server.client.get("/v1/sessions/s1")) == session


CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/v1/sessions/s1", None),
    ("PATCH", "/v1/sessions/s1", {"ttl_s": 5}),
    ("DELETE", "/v1/sessions/s1", None),
    ("POST", "/v1/sessions/s1/generate", {"input": "x"}),
    ("POST", "/v1/sessions/s1/append", {"input": "x"}),
    ("POST", "/v1/sessions/s1/clear", {"mark": 0}),
    ("POST", "/v1/sessions/s1/rewind", {"to_version": 0}),
    ("POST", "/v1/sessions/s1/fork", {}),
    ("GET", "/v1/sessions/s1/export", None),
    ("GET", "/v1/sessions/s1/states", None),
    ("POST", "/v1/states", {"name": "kept", "session": {"id": "s1"}}),
]


async def test_X16_every_call_of_a_session_is_among_these() -> None:
    async with gateway(FakeBackend()) as server:
        calls = {
            (method.upper(), path.replace("{session_id}", "s1"))
            for path, operations in server.app.openapi()["paths"].items()
            for method in operations
            if "{session_id}" in path and not path.endswith("/cancel")  # which asks nothing of the session
        }
        assert calls <= {(method, path) for method, path, _ in CALLS}


async def test_X16_a_session_whose_ttl_has_run_out_is_session_expired_and_not_session_not_found() -> None:
    clock = Clock()
    async with gateway(FakeBackend(), store=SqliteSessionStore(None, clock=clock)) as server:
        session = await create(server, ttl_s=60)
        assert session["expires_at"] == 1_060
        clock.advance(50)
        await say(server, "s1", "x")  # a turn moves the expiry on
        clock.advance(50)
        assert ok(await server.client.get("/v1/sessions/s1"))["version"] == 1
        clock.advance(11)
        for is_removed in (False, True):
            if is_removed:
                await server.store.remove_expired()
            for method, path, body in CALLS:
                response = await server.client.request(method, path, json=body)
                assert (response.status_code, error_of(response)["code"]) == (404, "session_expired"), path
        assert ok(await server.client.get("/v1/sessions"))["data"] == []
        never = await server.client.get("/v1/sessions/s2")
        assert (never.status_code, error_of(never)["code"]) == (404, "session_not_found")


@pytest.mark.parametrize("ttl_s", [0, -1, "60", 1e12, True])
@pytest.mark.parametrize("call", ["create", "patch", "fork"])
async def test_a_ttl_that_cannot_be_is_refused_by_name_limit_and_value(server: Gateway, call: str, ttl_s: Any) -> None:
    await create(server)
    path = {"create": "/v1/sessions", "patch": "/v1/sessions/s1", "fork": "/v1/sessions/s1/fork"}[call]
    method = "PATCH" if call == "patch" else "POST"
    response = await server.client.request(method, path, json={"ttl_s": ttl_s})
    assert (response.status_code, error_of(response)["param"]) == (400, "ttl_s")
    assert "ttl_s must be" in error_of(response)["message"]


@pytest.mark.parametrize("body", [{"metadata": {"k": 1}}, {"version": 3}, {"metadata": {"k": "v" * 513}}])
async def test_a_change_that_cannot_be_is_refused(server: Gateway, body: dict[str, Any]) -> None:
    before = await create(server)
    response = await patch(server, **body)
    assert response.status_code == 400, response.text
    assert ok(await server.client.get("/v1/sessions/s1")) == before


async def test_a_fork_goes_on_as_the_original_would(server: Gateway) -> None:
    await create(server, metadata={"k": "v"}, ttl_s=60)
    await say(server, "s1", "one")
    await say(server, "s1", "two")
    original = ok(await server.client.get("/v1/sessions/s1"))
    forked = await fork(server, id="s2")
    assert forked["forked_from"] == f"s1@{original['position']}"
    same = ("version", "position", "metadata", "ttl_s", "model_fingerprint")
    assert {name: forked[name] for name in same} == {name: original[name] for name in same}
    assert await log_of(server, "s2") == await log_of(server, "s1")
    answers = [await say(server, session_id, "three") for session_id in ("s1", "s2")]
    assert answers[0]["usage"] == answers[1]["usage"]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == original["position"]
    assert await log_of(server, "s2") == await log_of(server, "s1")
    stored = await server.services.store.load(SessionKey("default", "s2"))
    assert stored.snapshot is not None
    assert Snapshot.decode(stored.snapshot).state == state_after((await log_of(server, "s2"))[:-1])


async def test_a_fork_and_its_original_leave_each_other_alone(server: Gateway) -> None:
    await create(server)
    await say(server, "s1", "one")
    forked = await fork(server)
    assert forked["id"].startswith("sess_")
    before = await log_of(server, forked["id"])
    await say(server, "s1", "two")
    assert await log_of(server, forked["id"]) == before
    await server.client.delete("/v1/sessions/s1")
    assert (await say(server, forked["id"], "three"))["session"]["version"] == 2


async def test_a_fork_may_have_its_own_name_metadata_and_ttl(server: Gateway) -> None:
    await create(server, metadata={"k": "v"}, ttl_s=60)
    forked = await fork(server, id="s2", metadata={"mine": "x"}, ttl_s=None)
    assert (forked["id"], forked["metadata"], forked["ttl_s"]) == ("s2", {"mine": "x"}, None)
    response = await server.client.post("/v1/sessions/s1/fork", json={"id": "s2"})
    assert (response.status_code, error_of(response)["code"]) == (409, "version_conflict")
    response = await server.client.post("/v1/sessions/nobody/fork")
    assert (response.status_code, error_of(response)["code"]) == (404, "session_not_found")


async def test_an_empty_session_may_be_forked(server: Gateway) -> None:
    await create(server)
    forked = ok(await server.client.post("/v1/sessions/s1/fork"))
    assert (forked["version"], forked["forked_from"]) == (0, "s1@0")
    assert (await say(server, forked["id"], "one"))["session"]["version"] == 1


async def test_a_running_turn_does_not_prevent_a_fork_and_is_not_part_of_it() -> None:
    async with gateway(FakeBackend(hold=True), is_live=True) as server:
        backend = server.services.backend
        assert isinstance(backend, FakeBackend)
        await create(server)
        async with server.client.stream(
            "POST", "/v1/sessions/s1/generate", json={"input": "one", "stream": True}
        ) as stream:
            await backend.held.wait()
            forked = await fork(server)
            assert (forked["version"], forked["forked_from"]) == (0, "s1@0")
            backend.release_all()
            await stream.aread()
        assert ok(await server.client.get("/v1/sessions/s1"))["version"] == 1


async def test_a_fork_at_a_version_equals_a_rewind_to_it(server: Gateway) -> None:
    await create(server)
    for text in ("Hello", " again", " and on"):
        await say(server, "s1", text)
    log = await log_of(server, "s1")
    session = await fork(server, id="s2", version=2)
    copy = await fork(server, id="s3")
    ok(await server.client.post("/v1/sessions/s3/rewind", json={"to_version": 2}))
    rewound = await log_of(server, copy["id"])
    assert await log_of(server, "s2") == rewound == log[: len(rewound)]
    assert (session["version"], session["position"]) == (2, len(rewound) - 1)
    assert session["forked_from"] == f"s1@{len(rewound) - 1}"
    said = [(await say(server, each, " more"))["choices"] for each in ("s2", "s3")]
    assert said[0] == said[1]
    assert await log_of(server, "s1") == log


async def test_a_fork_at_a_position_ends_in_the_middle_of_a_turn(server: Gateway) -> None:
    await create(server)
    await say(server, "s1", [5, 6, 7], max_tokens=4)
    await say(server, "s1", [8], max_tokens=4)
    log = await log_of(server, "s1")
    session = await fork(server, id="s2", position=5)
    assert await log_of(server, "s2") == log[:5]
    assert (session["version"], session["position"]) == (1, 4)
    marks = await server.services.store.log_marks(SessionKey("default", "s2"))
    assert [(mark.version, mark.num_log_tokens, mark.num_sampled) for mark in marks] == [(1, 5, 2)]
    assert (await say(server, "s2", "", max_tokens=2))["session"]["version"] == 2


async def test_a_fork_at_the_start_is_empty_and_one_at_the_end_is_whole(server: Gateway) -> None:
    await create(server)
    await say(server, "s1", [5, 6, 7])
    log = await log_of(server, "s1")
    empty = await fork(server, position=0)
    assert (empty["version"], empty["position"], empty["snapshot_bytes"]) == (0, 0, 0)
    whole = await fork(server, position=len(log))
    assert (whole["version"], await log_of(server, whole["id"])) == (1, log)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"position": 99}, "position", "position must be in [0, 7], got 99"),
        ({"position": -1}, "position", "position must be in [0, 7], got -1"),
        ({"version": 9}, "version", "version must be a version that the session's log still has (the last are 0, 1)"),
        ({"version": 1, "position": 1}, "position", "exclude each other"),
    ],
)
async def test_a_fork_at_no_place_of_the_log_is_refused(
    server: Gateway, body: dict[str, int], param: str, message: str
) -> None:
    await create(server)
    await say(server, "s1", [5, 6, 7])
    response = await server.client.post("/v1/sessions/s1/fork", json={"id": "s2", **body})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert (await server.client.get("/v1/sessions/s2")).status_code == 404
