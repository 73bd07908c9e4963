"""Tools in chat: calls within their schemas, streamed and whole, and the next turn with their results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.chat_template import get_template
from nsm_core.tokenizer import Tokenizer
from nsm_core.tool_form import TOOL_FORM_OF
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.models import local_backend
from tests.support.rwkv7 import rwkv7_backend
from tests.support.schemas import ANSWER, MAX_TOKENS, POINT, check_json

MESSAGES = [{"role": "user", "content": "Where is it?"}]
PARAMETERS = {"locate": POINT, "describe": ANSWER}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
SAID = 'Let me see.<tool_call>{"name": "locate", "arguments": {"x": 1, "y": null}}</tool_call>'


RWKV = "rwkv-v1"  # calls in another form


@pytest.fixture(params=["nsm", "rwkv7"])
async def server(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    if request.param == "nsm":
        async with gateway(local_backend(tiny_tokenizer)) as server:
            yield server
    else:
        async with gateway(rwkv7_backend(tiny_tokenizer), chat_template=RWKV) as server:
            yield server


async def ask(server: Gateway, **body: Any) -> dict[str, Any]:
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2 * MAX_TOKENS, **body}
    answer = await server.client.post("/v1/chat/completions", json=fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def in_form(template: str) -> str:
    """SAID, as models of the template write it."""
    marks = TOOL_FORM_OF[get_template(template).tool_form]
    return SAID.replace("<tool_call>", marks.open).replace("</tool_call>", marks.close)


def assembled(frames: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """What a client makes of a stream: text, calls, finish reason."""
    text, calls, reason = "", list[dict[str, Any]](), ""
    for frame in frames:
        (choice,) = frame["choices"]
        text += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append(delta)
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return text, calls, reason


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"locate", "describe"}),
        ({"type": "function", "function": {"name": "describe"}}, {"describe"}),
    ],
)
async def test_a_forced_answer_is_a_call_within_its_schema(server: Gateway, choice: Any, names: set[str]) -> None:
    for seed in range(4):
        answer = await ask(server, tool_choice=choice, parallel_tool_calls=False, seed=seed)
        (call,) = answer["message"]["tool_calls"]
        assert answer["message"]["content"] is None
        assert answer["finish_reason"] == "tool_calls"
        assert call["function"]["name"] in names
        check_json(call["function"]["arguments"], PARAMETERS[call["function"]["name"]])


async def test_a_strict_tools_arguments_have_no_invented_fields(server: Gateway) -> None:
    parameters = {key: value for key, value in POINT.items() if key != "additionalProperties"}
    tools = [{"type": "function", "function": {"name": "locate", "strict": True, "parameters": parameters}}]
    for seed in range(4):
        answer = await ask(server, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed)
        check_json(answer["message"]["tool_calls"][0]["function"]["arguments"], POINT)


async def test_several_calls_are_allowed_unless_they_are_not(server: Gateway) -> None:
    body = {"tool_choice": "required", "logit_bias": {"0": -100.0}, "max_tokens": 300, "temperature": 0.5}
    answer = await ask(server, **body)  # without end of text it goes on with calls
    assert len(answer["message"]["tool_calls"]) > 1
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == len(answer["message"]["tool_calls"])


async def test_a_stream_of_a_call_has_the_clients_shapes(server: Gateway) -> None:
    body = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    whole = await ask(server, **body)
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2 * MAX_TOKENS, **body, "stream": True}
    streamed = await server.client.post("/v1/chat/completions", json=fields)
    text, (call,), reason = assembled(frames_of(streamed.text))
    assert (text, reason) == ("", "tool_calls")
    assert call["function"] == whole["message"]["tool_calls"][0]["function"]
    assert call["type"] == "function"


@pytest.mark.parametrize("template", ["plain-v1", RWKV])
async def test_a_text_may_come_before_its_calls_and_no_call_has_a_text(template: str) -> None:
    said = in_form(template)
    async with gateway(FakeBackend(" " + said), chat_template=template) as server:
        answer = await ask(server)
        streamed = await server.client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "tools": TOOLS, "stream": True, "max_tokens": 99}
        )
        plain = await ask(server, tool_choice="none")
    assert answer["message"]["content"] == "Let me see."
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": 1, "y": None}
    text, (call,), reason = assembled(frames_of(streamed.text))
    assert (text, call["function"]["name"], reason) == ("Let me see.", "locate", "tool_calls")
    assert plain["message"]["content"] == said  # tools that may not be called are not looked for


@pytest.mark.parametrize(
    ("template", "first", "result"),
    [
        ("plain-v1", "These tools can be called:\n", "<tool_response>found</tool_response>"),
        (RWKV, "System: Tools:\n[", "Function output:\nfound"),
    ],
)
async def test_results_come_back_as_messages_and_are_read_as_the_log_has_them(
    template: str, first: str, result: str
) -> None:
    backend = FakeBackend(" It is there.")
    call = {"id": "call_1", "type": "function", "function": {"name": "locate", "arguments": '{"x": 1, "y": null}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    async with gateway(backend, chat_template=template) as server:
        answer = await ask(server, messages=messages, max_tokens=40)
    assert answer["message"]["content"] == "It is there."
    prompt = backend.tokenizer.decode(backend.requests[0].prompt_ids)
    assert prompt.startswith(first)
    assert prompt.endswith(f"Assistant: {in_form(template)}\n\nUser: {result}\n\nAssistant:")


async def test_a_speakers_name_is_read() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        await ask(server, messages=[{"role": "user", "name": "Ann", "content": "Hi"}], tools=[], max_tokens=1)
    assert backend.tokenizer.decode(backend.requests[0].prompt_ids) == "User: Ann: Hi\n\nAssistant:"


async def test_a_call_that_is_cut_is_shown_as_far_as_it_went(server: Gateway) -> None:
    answer = await ask(server, tool_choice="required", max_tokens=40)
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


async def test_a_form_and_tools_go_together(server: Gateway) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    kinds = set()
    for seed in range(8):
        answer = await ask(server, response_format=form, parallel_tool_calls=False, seed=seed)
        kinds.add(answer["finish_reason"])
        if answer["finish_reason"] == "stop":
            check_json(answer["message"]["content"], POINT)
    assert kinds <= {"stop", "tool_calls"}


FUNCTION = TOOLS[0]["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "a", "cost": 1}}]}, "tools[0].function.cost"),
        (
            {"tools": [TOOLS[0], {"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]},
            "tools[1].function.parameters",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages[1].tool_call_id"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "y"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "b"}]}]}, "messages[0].tool_calls"),
    ],
)
async def test_tools_that_cannot_be_held_are_a_400_that_names_them(
    server: Gateway, fields: dict[str, Any], param: str | None
) -> None:
    answer = await server.client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert answer.status_code == 400, answer.text
    assert param is None or error_of(answer)["param"] == param


async def test_a_refusal_of_calls_shows_once_what_it_got(server: Gateway) -> None:
    call = {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{bad"}}
    messages = [*MESSAGES, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    answer = await server.client.post("/v1/chat/completions", json={"messages": messages})
    message = error_of(answer)["message"]
    assert "arguments are a JSON object as a string" in message
    assert message.count(", got ") == 1
