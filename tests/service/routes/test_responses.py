"""The object, its events and its input; what is refused, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.responses import (
    FIRST_EVENTS,
    LAST_EVENTS,
    PATH,
    SCRIPT,
    encode,
    get,
    respond,
    session_ids,
    stream,
    text_of,
)
from tests.support.responses import backend as backend
from tests.support.responses import server as server
from tests.support.tenants import make_key, write_keys


async def test_the_stock_client_gets_a_response_streams_one_and_reads_both_again() -> None:
    async with gateway(FakeBackend(" " + DEFAULT_SCRIPT), is_live=True) as server:
        client = server.openai.responses
        whole = await client.create(model="fake-nsm", input="hello", metadata={"k": "v"}, user="somebody")
        async with client.stream(model="fake-nsm", input="hello") as opened:
            events = [event async for event in opened]
            streamed = await opened.get_final_response()
        again = await client.retrieve(whole.id)
        items = await client.input_items.list(whole.id)
        count = await client.input_tokens.count(model="fake-nsm", input="hello")
    assert (whole.object, whole.status, whole.output_text, whole.error) == (
        "response",
        "completed",
        DEFAULT_SCRIPT,
        None,
    )
    assert whole.id.startswith("resp_")
    assert whole.metadata == {"k": "v"}
    assert whole.incomplete_details is None
    assert whole.completed_at is not None
    assert again == whole
    assert streamed.output_text == DEFAULT_SCRIPT
    assert streamed.usage == whole.usage
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        *FIRST_EVENTS,
        *LAST_EVENTS,
        "response.completed",
    ]
    assert [(item.type, item.role) for item in items.data] == [("message", "user")]  # type: ignore[union-attr]
    assert whole.usage is not None
    assert count.input_tokens == whole.usage.input_tokens


async def test_S9_the_events_of_a_stream_are_numbered_and_agree_with_the_whole(server: Gateway) -> None:
    events = await stream(server)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    ended = events[-1]["response"]
    num_tokens = ended["usage"]["output_tokens"]
    types = [*FIRST_EVENTS, *["response.output_text.delta"] * num_tokens, *LAST_EVENTS, "response.completed"]
    assert [event["type"] for event in events] == types
    (item,) = ended["output"]
    assert {event["item_id"] for event in deltas} == {item["id"]}
    assert "".join(event["delta"] for event in deltas) == "It was" == text_of(ended)
    assert events[-4]["text"] == "It was"
    assert (events[-3]["part"], events[-2]["item"]) == (item["content"][0], item)
    opened = events[0]["response"]
    assert (opened["status"], opened["output"], opened["usage"]) == ("in_progress", [], None)
    assert await get(server, ended["id"]) == ended


async def test_what_the_input_may_be(server: Gateway, backend: FakeBackend) -> None:
    root = await respond(server)
    items = [
        {"role": "system", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *root["output"],
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    response = await server.client.post(PATH, json={"input": items})
    assert response.status_code == 200, response.text
    text = "Be kind.\n\nUser: a\n\nAssistant: It was\n\nb\nc\n\nUser: d\n\nAssistant:"
    assert backend.requests[-1].prompt_ids == (0, *encode(server, text))


async def test_the_input_items_are_listed_in_pages(server: Gateway) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    response = (await server.client.post(PATH, json={"input": items})).json()
    path = f"{PATH}/{response['id']}/input_items"

    async def page(**query: Any) -> tuple[list[str], bool]:
        body = (await server.client.get(path, params=query)).json()
        assert body["object"] == "list"
        assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
        return [item["content"][0]["text"] for item in body["data"]], body["has_more"]

    assert await page() == (["2", "1", "0"], False)
    assert await page(order="asc", limit=2) == (["0", "1"], True)
    last = (await server.client.get(path, params={"order": "asc", "limit": 2})).json()["last_id"]
    assert await page(order="asc", after=last) == (["2"], False)
    for query in ({"limit": 0}, {"order": "up"}):
        assert (await server.client.get(path, params=query)).status_code == 400
    missing = await server.client.get(path, params={"after": "msg_unknown"})
    assert (missing.status_code, error_of(missing)["param"]) == (404, "after")


BAD: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"input": 5}, "input", ["string or a list", "5"]),
    ({"input": []}, "input", ["at least 1"]),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", ["string", "5"]),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ["tool"]),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", ["is required"]),
    ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input[0].output", ["no field of a message"]),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", ["item_reference"]),
    ({"input": [{"type": [], "role": "user", "content": "x"}]}, "input[0].type", ["one of", "got []"]),
    ({"input": [{"type": {"a": 1}}]}, "input[0].type", ["one of", '{"a": 1}']),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        ["input_image"],
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input[0].content",
        ["input_file"],
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].name", ["null"]),
    ({"tool_choice": "required"}, "tool_choice", ["needs tools"]),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", ["xhigh", '"huge"']),
    ({"reasoning": {"summary": True}}, "reasoning.summary", ["detailed", "true"]),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens", ["unknown field"]),
    ({"reasoning": "high"}, "reasoning", ["must be a JSON object"]),
    ({"include": ["message.output_text.logprobs"]}, "include", ["not supported", "output_text.logprobs"]),
    ({"include": [["x"]]}, "include", ["not supported"]),
    ({"include": "x"}, "include", ["must be a list"]),
    ({"top_logprobs": 3}, "top_logprobs", ["not supported"]),
    ({"top_logprobs": False}, "top_logprobs", ["not supported", "false"]),
    ({"n": True}, "n", ["not supported", "true"]),
    ({"service_tier": 1}, "service_tier", ["must be a string, got 1"]),
    ({"text": {"format": {"type": "xml"}}}, "text.format", ["json_object"]),
    ({"truncation": "middle"}, "truncation", ["middle"]),
    ({"max_output_tokens": 0}, "max_output_tokens", ["[1, 32768]", "0"]),
    ({"max_tokens": 5}, "max_tokens", ["unknown field", "did you mean max_output_tokens?"]),
    ({"max_completion_tokens": 5}, "max_completion_tokens", ["did you mean max_output_tokens?"]),
    ({"messages": []}, "messages", ["did you mean input?"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["only allowed with stream: true"]),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a", ["unknown field"]),
    ({"temperature": 3}, "temperature", ["[0, 2]", "3"]),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", ["16", "17"]),
    ({"stop": ["x"] * 17}, "stop", ["16", "17"]),
    ({"previous_response_id": "r", "conversation": "c"}, "conversation", ["previous_response_id"]),
    ({"conversation": 5}, "conversation", ["id", "5"]),
    ({"conversation": "conv_unknown", "store": False}, "conversation", ["store"]),
    ({"background": True, "store": False}, "background", ["store"]),
    ({"model": "other"}, "model", ["other"]),
    ({"instruction": "x"}, "instruction", ["did you mean instructions?"]),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{param}-{n}" for n, (_, param, _) in enumerate(BAD)])
async def test_P10_what_cannot_be_done_is_refused_by_name(
    server: Gateway, body: dict[str, Any], param: str, words: list[str]
) -> None:
    response = await server.client.post(PATH, json={"input": "x", **body})
    error = error_of(response)
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert await session_ids(server) == []


async def test_what_wishes_for_nothing_is_accepted(server: Gateway) -> None:
    body = {
        "tools": [], "tool_choice": "auto", "include": [], "reasoning": {"effort": "none"}, "top_logprobs": 0,
        "text": {"format": {"type": "text"}}, "truncation": "auto", "parallel_tool_calls": True, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto", "max_tool_calls": 3,
    }  # fmt: skip
    assert (await respond(server, **body))["truncation"] == "auto"


async def test_hints_about_reasoning_change_nothing(server: Gateway) -> None:
    """As clients of reasoning models send them."""
    hints = {
        "reasoning": {"effort": "medium", "summary": "auto"},
        "reasoning_effort": "low",
        "include": ["reasoning.encrypted_content"],
    }
    plain, hinted = await respond(server, seed=1), await respond(server, seed=1, **hints)
    assert hinted["output"][0]["content"] == plain["output"][0]["content"]
    assert hinted["reasoning"] == {"effort": None, "summary": None}
    body = {"messages": [{"role": "user", "content": "x"}], "seed": 1}
    answers = [await server.client.post("/v1/chat/completions", json={**body, **more}) for more in ({}, hints)]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


async def test_L6_a_response_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    ours, theirs = make_key("ours"), make_key("theirs")
    path = write_keys(tmp_path / "keys.toml", ours, theirs, ours="", theirs="")
    async with gateway(FakeBackend(SCRIPT), api_keys_file=path) as server:

        async def ask(key: Any, method: str, route: str, body: Any = None) -> tuple[int, str]:
            answer = await server.client.request(method, PATH + route, json=body, headers=key.headers)
            return answer.status_code, answer.text

        made = await server.client.post(PATH, json={"input": "secret"}, headers=ours.headers)
        response_id = made.json()["id"]
        calls = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")]
        for method, suffix in calls:
            status, text = await ask(theirs, method, f"/{response_id}{suffix}")
            unknown = await ask(theirs, method, f"/resp_x{suffix}")
            assert (status, text.replace(response_id, "resp_x")) == unknown
            assert status == 404
        body = {"input": "x", "previous_response_id": response_id}
        assert (await ask(theirs, "POST", "", body))[0] == 404
        assert (await ask(ours, "POST", "", body))[0] == 200


async def test_the_quota_of_sessions_holds_for_responses(tmp_path: Path) -> None:
    key = make_key("ours")
    path = write_keys(tmp_path / "keys.toml", key, ours="max_sessions = 1")
    async with gateway(FakeBackend(SCRIPT), api_keys_file=path) as server:
        first = await server.client.post(PATH, json={"input": "x"}, headers=key.headers)
        more = {"input": "y", "previous_response_id": first.json()["id"]}
        assert (await server.client.post(PATH, json=more, headers=key.headers)).status_code == 200
        second = await server.client.post(PATH, json={"input": "x"}, headers=key.headers)
        assert (second.status_code, error_of(second)["code"]) == (429, "quota_exceeded")


async def test_the_stock_client_sees_errors_as_its_own() -> None:
    async with gateway(FakeBackend(SCRIPT), is_live=True) as server:
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            await server.openai.responses.retrieve("resp_unknown")
        with pytest.raises(openai.BadRequestError, match='must be "function"'):
            await server.openai.responses.create(
                model="fake-nsm", input="x", tools=[{"type": "web_search"}]
            )  # fmt: skip


THOUGHTS = [("rwkv-think-v1", ">Hm, who?</think>\nEmma."), ("rwkv-v1", "<think>Hm, who?</think>\nEmma.")]


@pytest.mark.parametrize(("template", "script"), THOUGHTS)
@pytest.mark.parametrize("store", [True, False])
async def test_a_thought_is_an_item_of_its_own_before_the_message(template: str, script: str, store: bool) -> None:
    async with gateway(FakeBackend(script), chat_template=template, is_live=True) as server:
        client = server.openai.responses
        whole = await client.create(model="fake-nsm", input="Who?", store=store, max_output_tokens=100)
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        thought: Any = whole.output[0]
        assert ([part.text for part in thought.content], whole.output_text) == (["Hm, who?"], "Emma.")
        assert whole.usage is not None
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        async with client.stream(model="fake-nsm", input="Who?", store=store, max_output_tokens=100) as opened:
            events: list[Any] = [event async for event in opened]
            streamed = await opened.get_final_response()
        assert [item.content[0].text for item in streamed.output] == ["Hm, who?", "Emma."]  # type: ignore[union-attr, index]
        thought_text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert thought_text == "Hm, who?"
        added = [event for event in events if event.type == "response.output_item.added"]
        assert [(event.output_index, event.item.type) for event in added] == [(0, "reasoning"), (1, "message")]
        if store:
            again = [event async for event in await client.retrieve(streamed.id, stream=True)]
            assert [event.type for event in again] == [event.type for event in events if event.type[:9] == "response."]
            sent_back: Any = [{"role": "user", "content": "Who?"}, *(item.model_dump() for item in whole.output)]
            follow = await client.create(model="fake-nsm", input=[*sent_back, {"role": "user", "content": "?"}])
            assert follow.output_text == "Emma."


async def test_an_answer_cut_in_its_thought_has_no_message() -> None:
    async with gateway(FakeBackend(">Hm, who?</think>\nEmma."), chat_template="rwkv-think-v1") as server:
        cut = await respond(server, "Who?", max_output_tokens=4)
        assert [(item["type"], item["status"]) for item in cut["output"]] == [("reasoning", "incomplete")]
        assert cut["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
