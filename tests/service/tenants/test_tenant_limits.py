"""A tenant's limits over HTTP: rate, requests that run, what is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend
from tests.support.gateway import FILE_HEADERS, Gateway, error_of, until
from tests.support.tenants import StillClock, TestKey, keyed, make_key, write_keys

COMPLETIONS = "/v1/completions"
S1 = "/v1/sessions/s1/generate"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 1}


def with_still_clock(server: Gateway) -> StillClock:
    """The clock of the server's rate limits."""
    clock = StillClock()
    server.services.tenants._clock = clock
    return clock


async def test_a_tenant_is_held_to_its_rate_and_told_where_it_stands(keys_file: Path, acme: TestKey) -> None:
    second, rival = make_key("acme"), make_key("rival")
    limits = {"acme": "requests_per_s = 0.5\nburst = 2", "rival": "requests_per_s = 0.5\nburst = 2"}
    backend = FakeBackend()
    async with keyed(keys_file, acme, second, rival, backend=backend, **limits) as server:
        clock = with_still_clock(server)

        async def post(key: TestKey) -> httpx.Response:
            return await server.client.post(COMPLETIONS, json=BODY, headers=key.headers)

        first = await post(acme)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "2.000s"
        assert (await post(second)).status_code == 200  # the limit is the tenant's, not the key's
        refused = await post(acme)
        error = error_of(refused)
        assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert error["message"].endswith("tenant is 0.5, its burst 2; try again in 2.00 s")
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await post(rival)).status_code == 200  # another's haste is not its fault
        assert len(backend.requests) == 3
        clock.now += 2.0
        assert (await post(second)).status_code == 200
        assert server.metric("nsm_rejected_total", reason="rate_limit") == 1


async def test_requests_that_run_are_limited_and_stay_so_when_their_clients_leave(
    keys_file: Path, acme: TestKey
) -> None:
    rival, backend = make_key("rival"), FakeBackend(hold=True)
    async with keyed(
        keys_file, acme, rival, backend=backend, is_live=True, acme="max_concurrent = 2", rival="max_concurrent = 2"
    ) as server:
        client = server.client
        await client.post("/v1/sessions", json={"id": "s1"}, headers=acme.headers)

        async def post(key: TestKey, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
            return await client.post(path, json=fields, headers=key.headers)

        async with client.stream("POST", S1, json={"input": "a", "stream": True}, headers=acme.headers):
            await until(lambda: len(backend.running) == 1)
        await until(lambda: server.metric("nsm_turns_detached") == 1)  # its client has left, the turn goes on
        chat = asyncio.create_task(
            post(acme, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True)
        )
        await until(lambda: len(backend.running) == 2)
        for path, fields in (
            (COMPLETIONS, {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/sessions/s2/generate", {"input": "x"}),
            ("/v1/sessions/s2/rewind", {"to_position": 0}),
        ):
            refused = await post(acme, path, **fields)
            error = error_of(refused)
            assert (refused.status_code, error["code"]) == (429, "concurrency_limit_exceeded"), refused.text
            assert "max_concurrent of this API key's tenant is 2: 2 requests are running" in error["message"]
            assert refused.headers["retry-after"] == "1"
        assert server.metric("nsm_rejected_total", reason="concurrency_limit") == 4
        assert (await client.get("/v1/sessions/s1", headers=acme.headers)).status_code == 200
        others = asyncio.create_task(post(rival, prompt=["x", "y"]))
        await until(lambda: len(backend.running) == 4)
        await client.post("/v1/sessions/s1/cancel", headers=acme.headers)
        await until(lambda: len(backend.running) == 3)
        third = asyncio.create_task(post(acme, prompt="x"))
        await until(lambda: len(backend.running) == 4)
        backend.release_all()
        assert [(await task).status_code for task in (chat, others, third)] == [200, 200, 200]
        assert set(server.services.tenants._running.values()) == {0}


async def test_more_at_once_than_a_tenant_may_ever_have_is_a_bad_request(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="max_concurrent = 3") as server:
        bodies: list[dict[str, Any]] = [{"prompt": "x", "n": 4}, {"prompt": ["x", "y"], "n": 2}]
        for body in bodies:
            response = await server.client.post(COMPLETIONS, json=body, headers=acme.headers)
            assert response.status_code == 400
            error = error_of(response)
            assert error["param"] == "n"
            assert "at most 3 (max_concurrent" in error["message"]
            assert error["message"].endswith("got 4")


async def test_a_refused_request_leaves_no_trace_in_the_count(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="max_concurrent = 1") as server:
        for path, body in (
            ("/v1/sessions/nope/generate", {"input": "x"}),
            ("/v1/sessions/nope/rewind", {"to_position": 0}),
            (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
            (COMPLETIONS, BODY),
            (COMPLETIONS, {**BODY, "stream": True}),
        ):
            assert (await server.client.post(path, json=body, headers=acme.headers)).status_code in (200, 400, 404)
        assert server.services.tenants._running["acme"] == 0


async def test_D3_no_more_sessions_than_the_tenant_may_keep(keys_file: Path, acme: TestKey) -> None:
    rival = make_key("rival")
    async with keyed(keys_file, acme, rival, acme="max_sessions = 2", rival="") as server:

        async def create(key: TestKey, **body: Any) -> httpx.Response:
            return await server.client.post("/v1/sessions", json=body, headers=key.headers)

        at_once = await asyncio.gather(*(create(acme, id=f"s{number}") for number in range(6)))
        assert sorted(response.status_code for response in at_once) == [200, 200, *[429] * 4]
        refused = next(response for response in at_once if response.status_code == 429)
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
        assert error["message"].startswith("max_sessions of this API key's tenant is 2, and ")
        assert refused.headers["x-should-retry"] == "false"
        assert server.metric("nsm_rejected_total", reason="session_quota") == 4
        assert (await create(rival)).status_code == 200
        created = next(response.json()["id"] for response in at_once if response.status_code == 200)
        turn = await server.client.post(
            f"/v1/sessions/{created}/generate", json={"input": "x", "max_tokens": 1}, headers=acme.headers
        )
        assert turn.status_code == 200  # what exists goes on
        await server.client.delete(f"/v1/sessions/{created}", headers=acme.headers)
        assert (await create(acme)).status_code == 200


async def test_D3_forks_and_imports_count_as_new_sessions(keys_file: Path, acme: TestKey) -> None:
    limits = {"sessions": "max_sessions = 2", "bytes": "max_stored_bytes = {}"}
    async with keyed(keys_file, acme, acme="") as server:
        client, headers = server.client, acme.headers
        await client.post("/v1/sessions", json={"id": "s1"}, headers=headers)
        assert (await client.post(S1, json={"input": "x", "max_tokens": 1}, headers=headers)).status_code == 200
        exported = (await client.get("/v1/sessions/s1/export", headers=headers)).content
        num_bytes = (await server.services.store.usage(tenant="acme")).num_bytes
        head = await server.services.store.get(SessionKey("acme", "s1"))
        copy_bytes = head.snapshot_bytes + 4 * head.num_log_tokens  # without what its turn left for retries
        clock = StillClock()
        keys = server.services.tenants._keys
        assert keys is not None
        keys._clock, keys._checked_at = clock, 0.0
        for name, room in (("sessions", 2), ("bytes", num_bytes + copy_bytes)):
            write_keys(keys_file, acme, acme=limits[name].format(room))
            clock.now += 1.0
            statuses = []
            for number in range(2):
                fork = await client.post("/v1/sessions/s1/fork", json={"id": f"f{number}"}, headers=headers)
                copy = await client.post(
                    f"/v1/sessions/import?id=i{number}", content=exported, headers=headers | FILE_HEADERS
                )
                statuses += [fork.status_code, copy.status_code]
            assert statuses == [200, 429, 429, 429], name
            await client.delete("/v1/sessions/f0", headers=headers)


async def test_D3_a_turn_that_could_not_be_kept_does_not_begin(keys_file: Path, acme: TestKey) -> None:
    backend = FakeBackend()
    async with keyed(keys_file, acme, backend=backend, acme="max_stored_bytes = 100") as server:
        client, headers = server.client, acme.headers
        for name in ("s1", "s2"):
            assert (await client.post("/v1/sessions", json={"id": name}, headers=headers)).status_code == 200
        turn = {"input": "x", "max_tokens": 1}
        assert (await client.post(S1, json=turn, headers=headers)).status_code == 200
        num_bytes = (await server.services.store.usage(tenant="acme")).num_bytes
        assert num_bytes > 100
        for path, body in (
            ("/v1/sessions/s2/generate", turn),
            (S1, turn),
            ("/v1/sessions", {}),
            ("/v1/conversations", {}),
        ):
            refused = await client.post(path, json=body, headers=headers)
            error = error_of(refused)
            assert (refused.status_code, error["code"]) == (429, "quota_exceeded"), path
            assert f"max_stored_bytes of this API key's tenant is 100, and {num_bytes} are stored" in error["message"]
        assert len(backend.requests) == 1
        assert server.metric("nsm_rejected_total", reason="byte_quota") == 4
        await client.delete("/v1/sessions/s1", headers=headers)
        assert (await client.post("/v1/sessions/s2/generate", json=turn, headers=headers)).status_code == 200


async def test_D3_documents_count_and_deleting_them_makes_room(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="max_stored_bytes = 8_000") as server:
        client, headers = server.client, acme.headers
        message = {"type": "message", "role": "user", "content": "x" * 3_000}
        made = await client.post("/v1/conversations", json={"items": [message]}, headers=headers)
        assert made.status_code == 200
        path = f"/v1/conversations/{made.json()['id']}"
        assert (await client.post(f"{path}/items", json={"items": [message]}, headers=headers)).status_code == 200
        for request in ((f"{path}/items", {"items": [message]}), ("/v1/conversations", {"items": [message]})):
            num_bytes = await server.services.records.usage(tenant="acme")
            refused = await client.post(request[0], json=request[1], headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (429, "quota_exceeded")
            assert f"and {num_bytes} are stored" in error_of(refused)["message"]
            assert await server.services.records.usage(tenant="acme") == num_bytes  # nothing half-written
        response = await client.post("/v1/responses", json={"input": "y" * 3_000}, headers=headers)
        assert response.status_code == 200  # it begins below the limit
        late = await client.post("/v1/responses", json={"input": "z"}, headers=headers)
        assert (late.status_code, error_of(late)["code"]) == (429, "quota_exceeded")
        assert (await client.delete(f"/v1/responses/{response.json()['id']}", headers=headers)).status_code == 200
        assert (await client.delete(path, headers=headers)).status_code == 200
        assert await server.services.records.usage(tenant="acme") == 0
        assert (await server.services.store.usage(tenant="acme")).num_bytes == 0


async def test_texts_to_embed_wait_for_each_other_under_a_limit(keys_file: Path, acme: TestKey) -> None:
    async with keyed(keys_file, acme, acme="max_concurrent = 1") as server:
        response = await server.client.post("/v1/embeddings", json={"input": ["a", "b", "c"]}, headers=acme.headers)
        assert response.status_code == 200, response.text
        assert len(response.json()["data"]) == 3
        assert server.services.tenants._running["acme"] == 0
