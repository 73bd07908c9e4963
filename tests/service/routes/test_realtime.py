"""WS /v1/realtime with the stock client: items are read as they come, answers stream, and a reconnect goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway, until
from tests.support.tenants import make_key, write_keys

MODEL = "fake-nsm"
WORDS = " It was the best of times, it was the worst of times, it was the age of wisdom"


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(" It was the best of times"), is_live=True) as made:
        yield made


def item(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}


async def say(connection: AsyncRealtimeConnection, text: str, **fields: Any) -> Any:
    """The item, once it is read."""
    await connection.conversation.item.create(item=item(text, **fields))  # type: ignore[arg-type]
    return (await until_event(connection, "conversation.item.done")).item


async def until_event(connection: AsyncRealtimeConnection, kind: str) -> Any:
    """The next event of the kind. An error ends the test, unless it is what is waited for."""
    async for event in connection:
        assert event.type != "error" or kind == "error", event
        if event.type == kind:
            return event
    raise AssertionError(f"no {kind} came")


async def answer(connection: AsyncRealtimeConnection, **fields: Any) -> tuple[str, Any]:
    """The joined deltas, and the response at its end."""
    await connection.response.create(response={"max_output_tokens": 40, **fields})  # type: ignore[typeddict-item]
    text = ""
    async for event in connection:
        assert event.type != "error", event
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.done":
            return text, event.response
    raise AssertionError("no response.done came")


def session_of(server: Gateway, event: Any) -> dict[str, Any]:
    return dict(event.session.model_dump())


async def read_text(server: Gateway, session_id: str) -> str:
    """All that the session has read and sampled."""
    head = (await server.client.get(f"/v1/sessions/{session_id}")).json()
    tokens = await server.store.read_log(server_key(session_id), stop=10**6)
    assert head["id"] == session_id
    return server.services.backend.tokenizer.decode([token for token in tokens if token])


def server_key(session_id: str) -> Any:
    from service.stores.sessions.base import DEFAULT_TENANT
    from service.stores.sessions.key import SessionKey

    return SessionKey(DEFAULT_TENANT, session_id)


async def test_the_stock_client_has_a_conversation(server: Gateway) -> None:
    async with server.openai.realtime.connect(model=MODEL) as connection:
        created = await until_event(connection, "session.created")
        assert created.session.output_modalities == ["text"]
        await connection.session.update(session={"type": "realtime", "instructions": "A play."})
        assert (await until_event(connection, "session.updated")).session.instructions == "A play."
        assert (await say(connection, "Who is there?")).content[0].text == "Who is there?"
        text, response = await answer(connection)
        assert text == "It was the best of times"
        assert (response.status, response.output[0].content[0].text) == ("completed", text)
        assert response.usage.output_tokens > 0
        await say(connection, "Who else?")
        assert (await answer(connection))[0] == text
        session_id = session_of(server, created)["id"]
    assert await read_text(server, session_id) == (
        "A play.\n\nUser: Who is there?\n\nAssistant: It was the best of times"
        "\n\nUser: Who else?\n\nAssistant: It was the best of times"
    )


async def test_what_was_read_is_what_a_turn_with_messages_reads(server: Gateway) -> None:
    messages = [{"role": "user", "content": text} for text in ("One", "Two")]
    await server.client.post("/v1/sessions", json={"id": "plain"})
    body = {"messages": messages, "max_tokens": 40}
    await server.client.post("/v1/sessions/plain/generate", json=body)
    async with server.openai.realtime.connect(model=MODEL) as connection:
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        for message in messages:
            await say(connection, message["content"])
        await answer(connection)
    assert await read_text(server, session_id) == await read_text(server, "plain")


async def test_events_come_in_the_order_of_the_protocol(server: Gateway) -> None:
    async with server.openai.realtime.connect(model=MODEL) as connection:
        await say(connection, "Hi")
        await connection.response.create(event_id="e1")
        kinds = []
        async for event in connection:
            if not kinds or event.type != kinds[-1]:
                kinds.append(event.type)
            if event.type == "response.done":
                break
    assert kinds == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]


async def test_a_new_connection_goes_on_with_the_session(server: Gateway) -> None:
    """Items and answers that are sent again, with the ids that they had, are not read or made twice."""
    async with server.openai.realtime.connect(model=MODEL) as connection:
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        await say(connection, "Hi", id="item_1")
        await connection.response.create(event_id="answer_1")
        first = (await until_event(connection, "response.done")).response
    async with server.openai.realtime.connect(model=MODEL, extra_query={"session": session_id}) as connection:
        created = session_of(server, await until_event(connection, "session.created"))
        assert (created["id"], created["version"]) == (session_id, 2)
        await say(connection, "Hi", id="item_1")
        await connection.response.create(event_id="answer_1")
        again = (await until_event(connection, "response.done")).response
        assert (again.id, again.output[0].content[0].text) == (first.id, first.output[0].content[0].text)
        assert (await server.client.get(f"/v1/sessions/{session_id}")).json()["version"] == 2
        await say(connection, "More")
        await answer(connection)
        assert (await server.client.get(f"/v1/sessions/{session_id}")).json()["version"] == 4


async def test_a_cancel_ends_the_answer_and_nothing_of_it_stays() -> None:
    backend = FakeBackend(hold=True)
    async with (
        gateway(backend, is_live=True) as server,
        server.openai.realtime.connect(model=MODEL) as connection,
    ):
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        await connection.conversation.item.create(item=item("Hi"))  # type: ignore[arg-type]
        backend.release(1)
        await until_event(connection, "conversation.item.done")
        await connection.response.create()
        await until_event(connection, "response.created")
        await connection.response.cancel()
        done = (await until_event(connection, "response.done")).response
        assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
        assert (await server.client.get(f"/v1/sessions/{session_id}")).json()["version"] == 1
        await connection.response.cancel()
        assert (await until_event(connection, "error")).error.code == "response_cancel_not_active"


async def test_a_client_that_says_goodbye_ends_its_answer() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True) as server:
        async with server.openai.realtime.connect(model=MODEL) as connection:
            backend.release(1)
            await say(connection, "Hi")
            await connection.response.create()
            await until_event(connection, "response.created")
        await until(lambda: server.services.turns.num_running == 0)
        assert not backend.running


async def test_a_client_that_is_lost_finds_its_answer_when_it_comes_back() -> None:
    backend = FakeBackend(" It was", hold=True)
    async with gateway(backend, is_live=True) as server:
        connection = await server.openai.realtime.connect(model=MODEL).enter()
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        backend.release(1)
        await say(connection, "Hi")
        await connection.response.create(event_id="a")
        await until_event(connection, "response.created")
        connection._connection.transport.abort()
        backend.release(99)
        async with server.openai.realtime.connect(model=MODEL, extra_query={"session": session_id}) as connection:
            await connection.response.create(event_id="a")
            done = (await until_event(connection, "response.done")).response
        assert (done.status, done.output[0].content[0].text) == ("completed", "It was")


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "input_audio_buffer.append", "audio": ""}, "type"),
    ({"type": "nonsense"}, "type"),
    ({}, "type"),
    ({"type": "conversation.item.create"}, "item"),
    ({"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}}, "item.content"),
    ({"type": "conversation.item.create", "item": item("x", role="tool")}, "item.role"),
    ({"type": "conversation.item.create", "item": item("x", colour="red")}, "item.colour"),
    ({"type": "conversation.item.create", "item": item("x", id="a b")}, "item.id"),
    ({"type": "conversation.item.create", "item": item("x"), "previous_item_id": "y"}, "previous_item_id"),
    ({"type": "session.update", "session": {"output_modalities": ["audio"]}}, "session.output_modalities"),
    ({"type": "session.update", "session": {"model": "other"}}, "session.model"),
    ({"type": "session.update", "session": {"tools": [{"type": "function"}]}}, "session.tools"),
    ({"type": "response.create", "response": {"max_output_tokens": 0}}, "response.max_output_tokens"),
    ({"type": "session.update", "session": {"temperature": 5}}, "session.temperature"),
    ({"type": "session.update", "session": {"temperature": "hot"}}, "session.temperature"),
    ({"type": "session.update", "session": {"seed": "x"}}, "session.seed"),
    ({"type": "session.update", "session": {"seed": 2**64 - 1, "temperature": -1}}, "session.temperature"),
    ({"type": "session.update", "session": {"max_output_tokens": 10**9}}, "session.max_output_tokens"),
    ({"type": "response.create", "response": {"max_output_tokens": 10**9}}, "response.max_output_tokens"),
    ({"type": "response.create", "response": {"temperature": 9}}, "response.temperature"),
    ({"type": "response.create"}, "response"),  # nothing was read
]


async def test_a_wrong_event_is_an_error_event_and_the_connection_stays(server: Gateway) -> None:
    async with websockets.connect(f"{server.url.replace('http', 'ws')}/v1/realtime") as socket:
        await socket.recv()
        for number, (event, param) in enumerate(WRONG):
            if event.get("response", {}).get("temperature"):
                await socket.send(json.dumps({"type": "conversation.item.create", "item": item("x")}))
                await socket.recv()
                await socket.recv()
            if event == {"type": "response.create"}:
                continue
            await socket.send(json.dumps({**event, "event_id": f"e{number}"}))
            error = json.loads(await socket.recv())
            assert error["type"] == "error", event
            assert (error["error"]["param"], error["error"]["event_id"]) == (param, f"e{number}"), event
            assert "." not in (param or "") or error["error"]["message"].startswith(str(param)), event
        for raw in ("", "{", "[]", "1", '{"type": 1}', b"\xff"):
            await socket.send(raw)
            assert json.loads(await socket.recv())["type"] == "error"
        await socket.send(json.dumps({"type": "response.create"}))
        assert json.loads(await socket.recv())["type"] == "response.created"


async def test_an_answer_before_any_item_and_two_at_once_are_refused() -> None:
    backend = FakeBackend(hold=True)
    async with (
        gateway(backend, is_live=True) as server,
        server.openai.realtime.connect(model=MODEL) as connection,
    ):
        await connection.response.create()
        assert (await until_event(connection, "error")).error.param == "response"
        backend.release(1)
        await say(connection, "Hi")
        await connection.response.create()
        await connection.response.create()
        error = (await until_event(connection, "error")).error
        assert error.code == "conversation_already_has_active_response"
        backend.release(99)
        await until_event(connection, "response.done")


async def test_instructions_cannot_change_after_they_were_read(server: Gateway) -> None:
    async with server.openai.realtime.connect(model=MODEL) as connection:
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        await connection.session.update(session={"type": "realtime", "instructions": "A play."})
        await say(connection, "Hi")
    async with server.openai.realtime.connect(model=MODEL, extra_query={"session": session_id}) as connection:
        await connection.session.update(session={"type": "realtime", "instructions": "A play."})  # as clients do
        await until_event(connection, "session.updated")
        await connection.session.update(session={"type": "realtime", "instructions": "A poem."})
        assert (await until_event(connection, "error")).error.param == "session.instructions"


async def refused(url: str, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        await websockets.connect(url, **kwargs)
    response = caught.value.response
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["cache-control"] == "no-store"
    return response.status_code, json.loads(response.body)["error"]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "missing Sec-WebSocket-Key"),
        ({"sec-websocket-key": "short", "sec-websocket-version": "13"}, "invalid Sec-WebSocket-Key"),
        ({"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "8"}, "Sec-WebSocket-Version"),
    ],
)
async def test_a_handshake_that_is_none_is_refused_as_any_request(
    server: Gateway, headers: dict[str, str], words: str
) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket"}
    refused = await server.client.get("/v1/realtime", headers={**upgrade, **headers})
    error = error_of(refused)
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert refused.headers["x-request-id"].startswith("req_")
    assert refused.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/nowhere", "/v1/realtime/nowhere", "/v1/models", "/v1/completions"])
async def test_a_websocket_where_none_is_served_is_a_404_as_for_http(server: Gateway, path: str) -> None:
    status, error = await refused(f"{server.url.replace('http', 'ws')}{path}")
    assert (status, error["type"], error["code"]) == (404, "not_found_error", "not_found")
    assert error["message"] == f"no WebSocket is served at {path}"


async def test_only_whoever_may_call_the_server_may_connect(tmp_path: Path) -> None:
    made = make_key("acme")
    keys = write_keys(tmp_path / "keys.toml", made, acme="")
    async with gateway(FakeBackend(), is_live=True, api_keys_file=keys) as server:
        url = f"{server.url.replace('http', 'ws')}/v1/realtime"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await refused(url, additional_headers=headers))[0] == 401
        good = {"Authorization": f"Bearer {made.text}"}
        status, error = await refused(f"{url}?model=other", additional_headers=good)
        assert (status, error["param"]) == (404, "model")
        assert (await refused(f"{url}?session=none", additional_headers=good))[0] == 404
        assert (await refused(url, additional_headers=good, origin="https://evil.example"))[0] == 403
        offered = ["realtime", f"openai-insecure-api-key.{made.text}"]
        async with websockets.connect(url, subprotocols=offered) as socket:  # type: ignore[arg-type]
            assert socket.subprotocol == "realtime"
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=made.text)
        async with client.realtime.connect(model=MODEL) as connection:
            await say(connection, "Hi")
        await client.close()


async def test_a_connection_without_events_is_closed(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.routes.realtime.IDLE_S", 0.05)
    async with websockets.connect(f"{server.url.replace('http', 'ws')}/v1/realtime") as socket:
        await socket.recv()
        with pytest.raises(websockets.ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 60)
        assert socket.close_code == 1001


async def test_an_http_request_there_is_told_what_it_is(server: Gateway) -> None:
    response = await server.client.get("/v1/realtime")
    assert (response.status_code, response.headers["upgrade"]) == (426, "websocket")
    assert error_of(response)["code"] == "upgrade_required"


async def test_a_refused_connection_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        url = f"{server.url.replace('http', 'ws')}/v1/realtime"
        assert (await refused(f"{url}?session=none"))[0] == 404
        assert (await refused(f"{url}?session=a%20b"))[0] == 400
        assert (await refused(url, origin="https://evil.example"))[0] == 403
        assert (await refused(f"{url}/nowhere"))[0] == 404
        connection = await websockets.connect(url)
        await connection.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_update_that_is_not_waited_for_holds_for_the_next_response() -> None:
    async with (
        gateway(FakeBackend(WORDS), is_live=True) as server,
        server.openai.realtime.connect(model=MODEL) as connection,
    ):
        await connection.conversation.item.create(item=item("Hi"))  # type: ignore[arg-type]
        await connection.session.update(session={"type": "realtime", "max_output_tokens": 3})
        await connection.response.create()
        done = (await until_event(connection, "response.done")).response
        assert (done.status, done.usage.output_tokens) == ("incomplete", 3)
        await connection.session.update(session={"type": "realtime", "max_output_tokens": "inf"})
        await connection.response.create(response={"max_output_tokens": 5})
        assert (await until_event(connection, "response.done")).response.usage.output_tokens == 5


async def test_without_a_length_an_answer_goes_to_its_end_or_to_the_limit_of_the_server() -> None:
    for limit, status in ((1000, "completed"), (20, "incomplete")):
        async with (
            gateway(FakeBackend(WORDS), is_live=True, max_tokens_limit=limit) as server,
            server.openai.realtime.connect(model=MODEL) as connection,
        ):
            assert (await until_event(connection, "session.created")).session.max_output_tokens == "inf"
            await say(connection, "Hi")
            await connection.response.create()
            done = (await until_event(connection, "response.done")).response
            assert done.status == status
            if limit == 20:
                assert done.usage.output_tokens == limit
            else:
                assert done.output[0].content[0].text == WORDS.strip()


async def test_the_id_of_an_event_finds_its_answer_whatever_the_settings_are_by_then(server: Gateway) -> None:
    async with server.openai.realtime.connect(model=MODEL) as connection:
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        await say(connection, "Hi", id="item_1")
        await connection.session.update(session={"type": "realtime", "max_output_tokens": 5, "seed": 3})
        await connection.response.create(event_id="a")
        first = (await until_event(connection, "response.done")).response
    async with server.openai.realtime.connect(model=MODEL, extra_query={"session": session_id}) as connection:
        await connection.response.create(event_id="a")
        again = (await until_event(connection, "response.done")).response
        assert (again.id, again.output, again.usage) == (first.id, first.output, first.usage)


async def test_the_id_of_an_item_is_not_taken_for_another_text(server: Gateway) -> None:
    async with server.openai.realtime.connect(model=MODEL) as connection:
        await say(connection, "Hi", id="item_1")
        await connection.conversation.item.create(item=item("Ho", id="item_1"), event_id="e")  # type: ignore[arg-type]
        error = (await until_event(connection, "error")).error
        assert (error.code, error.param, error.event_id) == ("idempotency_key_reused", "item.id", "e")
        assert error.message.startswith('item.id "item_1" was used before')


async def test_an_item_that_is_sent_again_beside_its_answer_and_one_that_waits_for_it() -> None:
    backend = FakeBackend(" It was", hold=True)
    async with gateway(backend, is_live=True) as server:
        connection = await server.openai.realtime.connect(model=MODEL).enter()
        session_id = session_of(server, await until_event(connection, "session.created"))["id"]
        backend.release(1)
        await say(connection, "Hi", id="item_1")
        await connection.response.create(event_id="a")
        await until_event(connection, "response.created")
        connection._connection.transport.abort()
        async with server.openai.realtime.connect(model=MODEL, extra_query={"session": session_id}) as connection:
            assert (await say(connection, "Hi", id="item_1")).id == "item_1"  # the answer still runs
            await connection.conversation.item.create(item=item("Ho", id="item_1"))  # type: ignore[arg-type]
            assert (await until_event(connection, "error")).error.param == "item.id"
            assert server.services.turns.num_running == 1
            await connection.conversation.item.create(item=item("More", id="item_2"))  # type: ignore[arg-type]
            backend.release(99)
            assert (await until_event(connection, "conversation.item.done")).item.id == "item_2"
        assert (await server.client.get(f"/v1/sessions/{session_id}")).json()["version"] == 3


async def test_an_item_does_not_wait_for_ever_for_a_session_that_another_turn_has() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True, lease_s=1.0) as server:
        async with server.openai.realtime.connect(model=MODEL) as connection:
            key = server_key(session_of(server, await until_event(connection, "session.created"))["id"])
            async with server.services.turns.exclusive(key):
                await connection.conversation.item.create(item=item("Hi"), event_id="e")  # type: ignore[arg-type]
                error = (await until_event(connection, "error")).error
        assert (error.code, error.event_id) == ("session_busy", "e")
