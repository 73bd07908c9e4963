from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import Overloaded, StorageFull
from service.app import create_app
from service.deps import Services
from service.settings import load_settings
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.turns.turn import Turn
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.live_server import serving

EOT = 0


@dataclasses.dataclass
class Gateway:
    backend: FakeBackend
    store: SqliteSessionStore
    services: Services
    client: httpx.AsyncClient

    async def create(self, **body: Any) -> dict[str, Any]:
        return dict(ok(await self.client.post("/v1/sessions", json=body)))

    async def generate(self, session_id: str = "s1", **body: Any) -> httpx.Response:
        return await self.client.post(f"/v1/sessions/{session_id}/generate", json=body)


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def frames(text: str) -> list[dict[str, Any]]:
    """The JSON frames of a stream, which must end with [DONE]."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.partition("data: ")[2]) for part in parts[:-2]]


@contextlib.asynccontextmanager
async def make_gateway(tmp_path: Path, backend: FakeBackend, **settings: Any) -> AsyncIterator[Gateway]:
    """Without a socket: an answer is seen when it is complete."""
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteSessionStore(None)
        app = create_app(load_settings(store="memory", data_dir=tmp_path, **settings), backend, store)
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        yield Gateway(backend, store, app.state.services, client)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with make_gateway(tmp_path, FakeBackend()) as made:
        yield made


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway on a socket, whose tokens wait until the test lets them go."""
    backend, store = FakeBackend(hold=True), SqliteSessionStore(None)
    app = create_app(load_settings(store="memory", data_dir=tmp_path), backend, store)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as client:
        yield Gateway(backend, store, app.state.services, client)
        backend.release_all()


async def test_a_session_is_created_with_and_without_a_body(gateway: Gateway) -> None:
    session = ok(await gateway.client.post("/v1/sessions"))
    assert session["id"].startswith("sess_")
    assert (session["object"], session["version"], session["position"]) == ("session", 0, 0)
    assert (session["model"], session["metadata"]) == ("fake-nsm", {})
    assert isinstance(session["created_at"], int)
    named = await gateway.create(id="My_session-1", metadata={"topic": "cats"})
    assert (named["id"], named["metadata"]) == ("My_session-1", {"topic": "cats"})
    assert ok(await gateway.client.get("/v1/sessions/My_session-1")) == named


async def test_an_id_that_is_taken_is_a_conflict_that_clients_do_not_retry(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    response = await gateway.client.post("/v1/sessions", json={"id": "s1"})
    error = refused(response, 409)
    assert (error["code"], response.headers["x-should-retry"]) == ("version_conflict", "false")
    assert "'s1' exists already" in error["message"]
    assert error["param"] == "id"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"id": ""}, "id", '""'),
        ({"id": "a b"}, "id", '"a b"'),
        ({"id": "x" * 65}, "id", "64"),
        ({"id": "é"}, "id", "A-Z"),
        ({"id": 5}, "id", "5"),
        ({"metadata": []}, "metadata", "object"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16 pairs, got 17"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "512"),
        ({"name": "x"}, "name", "unknown field"),
    ],
)
async def test_a_bad_body_of_a_session_names_the_field(
    gateway: Gateway, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(await gateway.client.post("/v1/sessions", json=body), 400)
    assert error["param"] == param
    assert says in error["message"]


async def test_a_session_of_an_unknown_model_is_refused(gateway: Gateway) -> None:
    error = refused(await gateway.client.post("/v1/sessions", json={"model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_sessions_are_listed_newest_first_in_pages(gateway: Gateway) -> None:
    for number in range(3):
        await gateway.create(id=f"s{number}")
    first = ok(await gateway.client.get("/v1/sessions", params={"limit": 2}))
    assert [session["id"] for session in first["data"]] == ["s2", "s1"]
    assert (first["object"], first["has_more"]) == ("list", True)
    rest = ok(await gateway.client.get("/v1/sessions", params={"limit": 2, "after": first["next_cursor"]}))
    assert [session["id"] for session in rest["data"]] == ["s0"]
    assert (rest["has_more"], rest["next_cursor"]) == (False, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"limit": "x"}, "limit"), ({"after": "?"}, "after")],
)
async def test_a_bad_page_is_refused(gateway: Gateway, query: dict[str, Any], param: str) -> None:
    assert refused(await gateway.client.get("/v1/sessions", params=query), 400)["param"] == param


@pytest.mark.parametrize("session_id", ["nobody", "with%20blank", "x" * 65, "%C3%A9", "%00"])
async def test_P9_an_unknown_session_is_404_by_every_door(gateway: Gateway, session_id: str) -> None:
    url = f"/v1/sessions/{session_id}"
    for response in (
        await gateway.client.get(url),
        await gateway.client.delete(url),
        await gateway.client.post(f"{url}/generate", json={"input": "x"}),
        await gateway.client.post(f"{url}/generate", json={"input": "x", "stream": True}),
        await gateway.client.post(f"{url}/cancel"),
    ):
        error = refused(response, 404)
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "session_id", "session_not_found")
    assert not gateway.backend.requests


async def test_a_turn_answers_like_a_completion_and_says_where_the_session_is(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    answer = ok(await gateway.generate(input=[5, 6], max_tokens=4))
    assert (answer["object"], answer["model"]) == ("text_completion", "fake-nsm")
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "It was the best", "logprobs": None, "finish_reason": "length"}
    assert answer["session"] == {"id": "s1", "version": 1, "position": 5}
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    session = ok(await gateway.client.get("/v1/sessions/s1"))
    assert (session["version"], session["position"]) == (1, 5)
    assert session["snapshot_bytes"] > 0


async def test_R1_R17_the_next_turn_reports_the_tokens_it_did_not_read_again(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    first = ok(await gateway.generate(input="Hello", max_tokens=4))
    second = ok(await gateway.generate(input=[7, 8, 9], max_tokens=4))
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["session"]["position"]
    assert usage["prompt_tokens"] - first["session"]["position"] == 1 + 3  # the pending token and the new input
    stats = gateway.backend.stats()
    assert stats.tokens_resumed == first["session"]["position"]
    assert stats.tokens_computed == first["usage"]["prompt_tokens"] + 4


async def test_a_text_turn_of_an_empty_session_starts_with_end_of_text(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    ok(await gateway.generate(input="was the"))
    assert gateway.backend.requests[0].prompt_ids == (EOT, *gateway.backend.tokenizer.encode("was the"))


async def test_messages_of_a_session_are_read_in_the_words_of_the_chat_template(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    encode, requests = gateway.backend.tokenizer.encode, gateway.backend.requests
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ok(await gateway.generate(messages=first, max_tokens=4))
    assert requests[0].prompt_ids == (EOT, *encode("Be brief.\n\nUser: Hello\n\nAssistant:"))
    assert requests[0].sampling.stop == ("\n\nUser:", "\nUser:")
    ok(await gateway.generate(messages=[{"role": "user", "content": "Bye"}], max_tokens=4, stop="x"))
    added = encode("\n\nUser: Bye\n\nAssistant:")
    assert requests[1].prompt_ids[-len(added) :] == tuple(added)
    assert requests[1].sampling.stop == ("x", "\n\nUser:", "\nUser:")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "b", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
async def test_messages_that_cannot_be_read_name_the_field(gateway: Gateway, body: dict[str, Any], param: str) -> None:
    await gateway.create(id="s1")
    assert refused(await gateway.generate(**body), 400)["param"] == param


async def test_a_first_message_is_not_read_after_the_turn_of_another_client(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    key = {"idempotency-key": "k"}
    first = ok(await gateway.client.post("/v1/sessions/s1/generate", json=body, headers=key))
    again = await gateway.client.post("/v1/sessions/s1/generate", json=body, headers=key)
    assert (ok(again), again.headers["idempotent-replayed"]) == (first, "true")


async def test_S3_S4_a_stream_has_the_chunks_of_a_completion_and_ends_with_the_session(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    options = {"include_usage": True}
    response = await gateway.generate(input=[5], max_tokens=100, stream=True, stream_options=options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last, usage = frames(response.text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == DEFAULT_SCRIPT
    assert all(piece["choices"][0]["finish_reason"] is None and "session" not in piece for piece in pieces)
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]
    head = await gateway.store.get(SessionKey("default", "s1"))
    assert last["session"] == {"id": "s1", "version": 1, "position": head.position}
    assert all(chunk["usage"] is None for chunk in (*pieces, last))
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 15)
    assert len({chunk["id"] for chunk in (*pieces, last, usage)}) == 1
    assert {chunk["object"] for chunk in (*pieces, last, usage)} == {"text_completion"}


async def test_S1_a_stream_and_a_whole_answer_say_the_same(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    await gateway.create(id="s2")
    whole = ok(await gateway.generate("s1", input=[5], max_tokens=9, logprobs=1))
    *pieces, last = frames((await gateway.generate("s2", input=[5], max_tokens=9, logprobs=1, stream=True)).text)
    assert "usage" not in last
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    tokens = [token for piece in pieces for token in piece["choices"][0]["logprobs"]["tokens"]]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == 9


async def test_the_client_may_answer_the_last_chunk_at_once(held: Gateway) -> None:
    held.backend.release_all()
    await held.create(id="s1")
    async with held.client.stream("POST", "/v1/sessions/s1/generate", json={"input": "x", "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if '"session":' in line:
                break
        assert ok(await held.generate(input="y"))["session"]["version"] == 2


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": 5}, "input", "string or a list of token ids"),
        ({"input": [True]}, "input", "token ids"),
        ({"input": ["a"]}, "input", "token ids"),
        ({"input": [5, 300]}, "input", "300"),
        ({"input": [-1]}, "input", "-1"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({}, "input", "must not be empty"),
        ({"input": "x" * 5000}, "input", "tokens"),
        ({"input": "x", "max_tokens": 0}, "max_tokens", "[1,"),
        ({"input": "x", "max_tokens": 10**9}, "max_tokens", "1000000000"),
        ({"input": "x", "temperature": -1}, "temperature", "-1"),
        ({"input": "x", "logprobs": 21}, "logprobs", "20"),
        ({"input": "x", "n": 2}, "n", "not supported"),
        ({"input": "x", "echo": True}, "echo", "not supported"),
        ({"input": "x", "prompt": "y"}, "prompt", "not supported"),
        ({"input": "x", "tools": [{}]}, "tools", "not supported"),
        ({"input": "x", "inputs": "y"}, "inputs", "did you mean input"),
        ({"input": "x", "stream_options": {}}, "stream_options", "stream: true"),
        ({"input": "x", "expected_version": "1"}, "expected_version", "integer"),
        ({"input": "x", "expected_version": True}, "expected_version", "integer"),
        ({"input": "x", "expected_version": -(10**30)}, "expected_version", f"at least 0, got -{10**30}"),
        ({"input": "x", "expected_version": 2**63}, "expected_version", f"at most {2**63 - 1}, got {2**63}"),
        ({"input": [2**64]}, "input", "got 18446744073709551616"),
    ],
)
async def test_a_bad_turn_names_the_field_and_leaves_the_session_free(
    tmp_path: Path, body: dict[str, Any], param: str, says: str
) -> None:
    async with make_gateway(tmp_path, FakeBackend(), max_prompt_tokens=100) as gateway:
        await gateway.create(id="s1")
        error = refused(await gateway.generate(**body), 400)
        assert error["param"] == param
        assert says in error["message"]
        assert ok(await gateway.generate(input="x"))["session"]["version"] == 1


async def test_an_empty_input_continues_from_the_pending_token(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    ok(await gateway.generate(input="x", max_tokens=4))
    second = ok(await gateway.generate(max_tokens=2))
    assert second["session"]["version"] == 2
    assert gateway.backend.requests[1].prompt_ids == (gateway.backend.script_ids[3],)


async def test_P6_two_turns_at_once_is_busy_with_retry_after(held: Gateway) -> None:
    await held.create(id="s1")
    first = asyncio.create_task(held.generate(input="x", max_tokens=2))
    await held.backend.held.wait()
    response = await held.generate(input="y")
    error = refused(response, 409)
    assert (error["code"], error["type"]) == ("session_busy", "invalid_request_error")
    assert int(response.headers["retry-after"]) >= 1
    assert "x-should-retry" not in response.headers  # stock clients try again by themselves
    held.backend.release_all()
    assert ok(await first)["session"]["version"] == 1


async def test_a_version_that_is_not_the_sessions_is_a_conflict(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    ok(await gateway.generate(input="x", expected_version=0))
    response = await gateway.generate(input="another", expected_version=0)
    error = refused(response, 409)
    assert (error["code"], response.headers["x-should-retry"]) == ("version_conflict", "false")
    assert (error["param"], error["message"]) == (
        "expected_version",
        "session 's1' is at version 1, expected_version was 0",
    )
    assert ok(await gateway.generate(input="x", expected_version=1))["session"]["version"] == 2


async def test_S8_a_cancelled_turn_tells_its_stream_and_keeps_nothing(held: Gateway) -> None:
    await held.create(id="s1")
    streaming = asyncio.create_task(held.generate(input="x", stream=True))
    await held.backend.held.wait()
    session = ok(await held.client.post("/v1/sessions/s1/cancel"))
    assert (session["cancelled"], session["version"]) == (True, 0)
    (error,) = frames((await streaming).text)
    assert error["error"]["code"] == "turn_cancelled"
    again = ok(await held.client.post("/v1/sessions/s1/cancel"))
    assert (again["cancelled"], again["version"]) == (False, 0)


async def test_a_cancelled_turn_that_does_not_stream_is_a_conflict(held: Gateway) -> None:
    await held.create(id="s1")
    waiting = asyncio.create_task(held.generate(input="x"))
    await held.backend.held.wait()
    ok(await held.client.post("/v1/sessions/s1/cancel"))
    response = await waiting
    assert refused(response, 409)["code"] == "turn_cancelled"
    assert response.headers["x-should-retry"] == "false"


async def test_a_deleted_session_is_gone_and_its_turn_stopped(held: Gateway) -> None:
    await held.create(id="s1")
    waiting = asyncio.create_task(held.generate(input="x"))
    await held.backend.held.wait()
    deleted = ok(await held.client.delete("/v1/sessions/s1"))
    assert deleted == {"id": "s1", "object": "session.deleted", "deleted": True}
    refused(await waiting, 409)
    refused(await held.client.get("/v1/sessions/s1"), 404)
    assert not held.backend.running


async def detached(turn: Turn) -> None:
    """Returns when the server has noticed that the turn's client left."""
    while turn._timer is None:  # noqa: ASYNC110 - it tells nobody else
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_S7_a_client_that_leaves_finds_its_turn_committed(held: Gateway, is_stream: bool) -> None:
    await held.create(id="s1")
    body = {"input": "x", "max_tokens": 3, "stream": is_stream}
    asking = asyncio.create_task(held.client.post("/v1/sessions/s1/generate", json=body))
    await held.backend.held.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert held.services.turns.num_running == 1
    (turn,) = held.services.turns._running.values()
    await detached(turn)
    held.backend.release_all()
    await turn.ended.wait()
    assert held.backend.num_cancels == 0
    assert ok(await held.client.get("/v1/sessions/s1"))["version"] == 1


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_full_store_is_507_or_an_error_frame_and_the_session_is_as_before(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise StorageFull("the session store is full")

    await gateway.create(id="s1")
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "commit", full)
        response = await gateway.generate(input="x", stream=is_stream)
    if is_stream:
        *_, last = frames(response.text)
        assert last["error"]["code"] == "storage_full"
    else:
        assert refused(response, 507)["code"] == "storage_full"
        assert response.headers["x-should-retry"] == "false"
    assert ok(await gateway.client.get("/v1/sessions/s1"))["version"] == 0


async def test_a_refusal_of_the_engine_comes_as_a_status_not_in_the_stream(gateway: Gateway) -> None:
    await gateway.create(id="s1")
    gateway.backend.refusal = Overloaded("the queue is full", retry_after_s=2.0)
    response = await gateway.generate(input="x", stream=True)
    assert refused(response, 503)["code"] == "overloaded"
    assert response.headers["retry-after"] == "2"


async def test_a_sessions_stream_has_no_running_usage(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    error = refused(await gateway.generate(input="Once", stream=True, stream_options=options), 400)
    assert error["param"] == "stream_options.continuous_usage_stats"
