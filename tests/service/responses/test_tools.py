"""Tools in responses: calls as items, their events, and results that continue the chain."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall

from nsm_core.tokenizer import Tokenizer
from service.responses.stream import output_of
from service.schemas.items import call_item, input_item, messages_of, result_item
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.models import local_backend
from tests.support.schemas import MAX_TOKENS, POINT, check_json

TOOLS = [{"type": "function", "name": "locate", "description": "To locate.", "parameters": POINT}]
CALL = '<tool_call>{"name": "locate", "arguments": {"x": 1, "y": null}}</tool_call>'
BODY: dict[str, Any] = {"input": "Where is it?", "tools": TOOLS, "max_output_tokens": 2 * MAX_TOKENS}


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    async with gateway(local_backend(tiny_tokenizer)) as server:
        yield server


async def create(server: Gateway, **body: Any) -> dict[str, Any]:
    answer = await server.client.post("/v1/responses", json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("store", [True, False])
async def test_a_forced_response_is_a_call_within_its_schema(server: Gateway, store: bool) -> None:
    response = await create(server, tool_choice="required", parallel_tool_calls=False, store=store)
    (item,) = response["output"]
    assert (response["status"], item["type"], item["name"]) == ("completed", "function_call", "locate")
    assert (response["tools"], response["tool_choice"]) == (TOOLS, "required")
    check_json(item["arguments"], POINT)
    ResponseFunctionToolCall.model_validate(item)


@pytest.mark.parametrize("store", [True, False])
async def test_the_events_of_a_text_and_a_call_come_in_order_and_again(store: bool) -> None:
    async with gateway(FakeBackend(f" Let me see.{CALL}")) as server:
        body = {**BODY, "stream": True, "store": store}
        first = events_of((await server.client.post("/v1/responses", json=body)).text)
        response = first[-1]["response"]
        if store:
            again = await server.client.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
            assert events_of(again.text) == first
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    kinds = [event["type"].removeprefix("response.") for event in first]
    assert [kind for kind, after in zip(kinds, [*kinds[1:], ""], strict=True) if kind != after] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    message, call = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    pieces = [event["delta"] for event in first if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call["arguments"] == '{"x": 1, "y": null}'
    assert call["call_id"].startswith("call_")


async def test_a_result_continues_the_chain_and_is_read_as_text() -> None:
    backend = FakeBackend(f" {CALL}")
    async with gateway(backend) as server:
        first = await create(server)
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "found"}
        await create(server, input=[result], previous_response_id=first["id"])
        replayed = [{"role": "user", "content": "Where is it?"}, *first["output"], result]
        await create(server, input=replayed, store=False)
    read = [backend.tokenizer.decode(request.prompt_ids) for request in backend.requests]
    assert read[0].startswith("These tools can be called:\n")
    assert read[1] == "\n\nUser: <tool_response>found</tool_response>\n\nAssistant:"
    assert read[2] == f"{read[0]} {CALL}\n\nUser: <tool_response>found</tool_response>\n\nAssistant:"


async def test_a_result_of_no_call_is_a_400_that_names_it(server: Gateway) -> None:
    call = {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answer = await server.client.post(path, json={"input": [call, result]})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "input[1].call_id")
        assert "made before" in error_of(answer)["message"]


async def test_a_conversation_keeps_calls_and_results(server: Gateway) -> None:
    conversation = (await server.client.post("/v1/conversations", json={})).json()["id"]
    first = await create(server, conversation=conversation, tool_choice="required", parallel_tool_calls=False)
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "found"}
    await create(server, conversation=conversation, input=[result], tool_choice="none", max_output_tokens=4)
    items = (await server.client.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]


def test_an_answer_without_tools_is_one_message_whatever_it_says() -> None:
    opened = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
    }
    (item,) = output_of(opened, "msg_1", [CALL], status="completed", reasoning="none", tool_form="hermes").items
    assert item["content"][0]["text"] == CALL


def test_a_call_that_was_cut_is_incomplete() -> None:
    opened = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
    }
    message, call = output_of(
        opened, "msg_1", [f"Oh.{CALL[:-20]}"], status="incomplete", reasoning="none", tool_form="hermes"
    ).items
    assert (message["status"], call["status"]) == ("completed", "incomplete")
    (empty,) = output_of(opened, "msg_1", [""], status="completed", reasoning="none", tool_form="hermes").items
    assert empty["content"][0]["text"] == ""


def test_items_become_messages_with_calls_in_the_answers() -> None:
    items = [
        input_item("user", ["Hi"]),
        input_item("assistant", ["Let me see."]),
        call_item("c1", "locate", "{}"),
        call_item("c2", "locate", "{}"),
        result_item("c1", "a"),
        result_item("c2", "b"),
        call_item("c3", "locate", "{}"),
    ]
    call = '<tool_call>{"name": "locate", "arguments": {}}</tool_call>'
    assert [(message.role, message.content) for message in messages_of(items, "hermes")] == [
        ("user", "Hi"),
        ("assistant", f"Let me see.{call}\n{call}"),
        ("user", "<tool_response>a</tool_response>\n<tool_response>b</tool_response>"),
        ("assistant", call),
    ]
