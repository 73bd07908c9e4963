"""Answers in a form: every route that takes one, on a real engine; what is refused, and how."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from nsm_core.grammars.grammar import MAX_GRAMMAR_BYTES, Grammar
from nsm_core.tokenizer import Tokenizer
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.models import local_backend
from tests.support.schemas import MAX_TOKENS, SCHEMAS, check_json

MESSAGES = [{"role": "user", "content": "Which book?"}]


class Book(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=6)
    kind: Literal["tale", "novel"]
    year: int = Field(ge=1800, le=1900)


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    async with gateway(local_backend(tiny_tokenizer)) as server:
        yield server


def response_format(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": SCHEMAS[name]}}


async def post(server: Gateway, path: str, **body: Any) -> dict[str, Any]:
    answer = await server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_chats_answer_is_what_its_schema_allows(server: Gateway, name: str) -> None:
    body = {"messages": MESSAGES, "response_format": response_format(name), "max_tokens": MAX_TOKENS}
    answer = await post(server, "/v1/chat/completions", n=3, seed=1, **body)  # one draw in 120 gives three equal ones
    for choice in answer["choices"]:
        check_json(choice["message"]["content"], SCHEMAS[name])
        assert choice["finish_reason"] == "stop"
    if name == "answer":
        assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1


async def test_a_stream_gives_the_answer_of_one_object(server: Gateway) -> None:
    body = {"messages": MESSAGES, "response_format": response_format("answer"), "seed": 4, "max_tokens": MAX_TOKENS}
    whole = await post(server, "/v1/chat/completions", **body)
    streamed = await server.client.post("/v1/chat/completions", json={**body, "stream": True})
    pieces = [frame["choices"][0]["delta"].get("content", "") for frame in frames_of(streamed.text)]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


async def test_the_stock_client_parses_an_answer_into_its_model(tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), is_live=True) as server:
        await parse_with_the_stock_client(server)


async def parse_with_the_stock_client(server: Gateway) -> None:
    parsed = await server.openai.chat.completions.parse(
        model="random", messages=MESSAGES, response_format=Book, max_completion_tokens=MAX_TOKENS
    )
    book = parsed.choices[0].message.parsed
    assert isinstance(book, Book)
    response = await server.openai.responses.parse(
        model="random", input="Which book?", text_format=Book, max_output_tokens=MAX_TOKENS
    )
    assert isinstance(response.output_parsed, Book)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" b+\nb: "b"'}, "ab+"),
        ({"structured_outputs": {"regex": "[xy]{4}"}}, "[xy]{4}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "up" | "down"'}}, "up|down"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
        ({"guided_json": json.dumps({"const": {"a": 1}})}, '{"a": 1}'),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ],
)
async def test_every_form_holds_on_every_route(server: Gateway, form: dict[str, Any], pattern: str) -> None:
    sampling = {**form, "max_tokens": 60, "seed": 7}
    completion = await post(server, "/v1/completions", prompt="Say", **sampling)
    chat = await post(server, "/v1/chat/completions", messages=MESSAGES, **sampling)
    await post(server, "/v1/sessions", id="s")
    turn = await post(server, "/v1/sessions/s/generate", input="Say", **sampling)
    texts = [
        completion["choices"][0]["text"],
        chat["choices"][0]["message"]["content"],
        turn["choices"][0]["text"],
    ]
    for text in texts:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("store", [True, False])
async def test_a_responses_text_format_holds_and_is_told(server: Gateway, store: bool) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMAS["answer"], "strict": True}
    body = {"input": "Which book?", "text": {"format": form}, "store": store, "max_output_tokens": MAX_TOKENS}
    response = await post(server, "/v1/responses", **body)
    assert response["status"] == "completed"
    assert response["text"] == {"format": form}
    check_json(response["output"][0]["content"][0]["text"], SCHEMAS["answer"])


async def test_a_json_object_is_what_the_model_was_given_time_for(server: Gateway) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 30, "n": 4}
    answer = await post(server, "/v1/chat/completions", **body)
    for choice in answer["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


async def test_constrained_and_free_requests_share_a_batch(server: Gateway) -> None:
    """Alone and beside others a constrained request gives one text, and so does a free one."""
    bodies = [
        {"messages": MESSAGES, "seed": number, "max_tokens": MAX_TOKENS if number % 2 else 20}
        | ({"response_format": response_format("answer")} if number % 2 else {})
        for number in range(6)
    ]
    alone = [await post(server, "/v1/chat/completions", **body) for body in bodies]
    together = await asyncio.gather(*(post(server, "/v1/chat/completions", **body) for body in bodies))
    for one, other in zip(alone, together, strict=True):
        assert other["choices"] == one["choices"]


MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
SCHEMA_FIELD = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("form", "param", "said"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA_FIELD, "null"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            SCHEMA_FIELD,
            "not",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "size": 1}}},
            "response_format.json_schema.size",
            "size",
        ),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": [1]}, "guided_json", "object"),
        ({"guided_regex": "("}, "guided_regex", "grammar"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "at most"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no answer can have this form"),
        ({"guided_regex": "((((.{1,50}){1,50}){1,50}){1,50}){1,60}"}, "guided_regex", "too large"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no answer can have this form"),
        ({"guided_json": {"allOf": [{"$ref": "#"}]}}, "guided_json", "no answer can have this form"),
        ({"guided_json": MUTUAL}, "guided_json", "no answer can have this form"),
        ({"guided_json": ENDLESS}, "guided_json", "too large"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "excludes"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "max_tokens"),
    ],
)
async def test_a_form_that_cannot_be_held_is_a_400_that_names_it(
    server: Gateway, form: dict[str, Any], param: str, said: str
) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = await server.client.post(path, json={"max_tokens": 10, **prompt, **form})
        assert answer.status_code == 400, answer.text
        error = error_of(answer)
        assert error["param"] == param
        assert said in error["message"]


async def test_a_responses_format_that_cannot_be_held_is_a_400(server: Gateway) -> None:
    for form, param in (
        ({"type": "json_schema", "name": "a", "schema": {"not": {}}}, "text.format.schema"),
        ({"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}, "text.format.schema"),
        ({"type": "grammar"}, "text.format"),
    ):
        answer = await server.client.post("/v1/responses", json={"input": "a", "text": {"format": form}})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


async def test_a_tools_schema_that_no_arguments_can_have_is_a_400_that_names_it(server: Gateway) -> None:
    """As the request has it, also where the choice leaves out the tools before it."""
    functions = [
        {"name": name, "parameters": {"type": "object", **more}}
        for name, more in (("good", {}), ("bad", {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}))
    ]
    nested = [{"type": "function", "function": function} for function in functions]
    flat = [{"type": "function", **function} for function in functions]
    bad: dict[str, object] = {"type": "function", "function": {"name": "bad"}}
    for path, body, param in (
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": nested}, "tools[1].function.parameters"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": nested, "tool_choice": bad},
            "tools[1].function.parameters",
        ),
        ("/v1/responses", {"input": "a", "tools": flat}, "tools[1].parameters"),
    ):
        answer = await server.client.post(path, json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
        assert error_of(answer)["message"].startswith(f"{param} cannot be used as a grammar")


async def test_the_deadline_holds_while_a_form_is_not_answered() -> None:
    """As with an engine's process that is stopped."""

    async def never(_: Grammar) -> None:
        await asyncio.Event().wait()

    backend = FakeBackend()
    backend.check_grammar = never  # type: ignore[method-assign]
    async with gateway(backend) as server:
        await server.client.post("/v1/sessions", json={"id": "one"})
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/sessions/one/generate", {"input": "a"}),
        ):
            answer = await server.client.post(path, json={**prompt, "guided_regex": "a", "timeout": 0.05})
            assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded"), path
