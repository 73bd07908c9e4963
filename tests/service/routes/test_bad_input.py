"""Bad input gets a 4xx that names the field, the limit and what was given; nothing of it disturbs the next request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.service.routes.refusals import assert_refused
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]

# a field with its bad value, and the words that the message must have
BAD_SAMPLING: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": "0.5"}, ["number", '"0.5"']),
    ({"temperature": True}, ["number", "true"]),
    ({"temperature": -0.1}, ["[0, 2]", "-0.1"]),
    ({"temperature": 2.1}, ["[0, 2]", "2.1"]),
    ({"temperature": [1]}, ["number", "[1]"]),
    ({"top_p": 0}, ["(0, 1]", "0"]),
    ({"top_p": 1.5}, ["(0, 1]", "1.5"]),
    ({"top_k": -2}, ["top_k must be -1 or 0 (all tokens), or in [1, 2147483647], got -2"]),
    ({"top_k": 1.5}, ["integer", "1.5"]),
    ({"min_p": 2}, ["[0, 1]", "2"]),
    ({"repetition_penalty": 0}, ["(0, 10]", "0"]),
    ({"presence_penalty": 3}, ["[-2, 2]", "3"]),
    ({"frequency_penalty": -3}, ["[-2, 2]", "-3"]),
    ({"logit_bias": {"5": 101}}, ["[-100, 100]", "101"]),
    ({"logit_bias": {"5": "1"}}, ["number", '"1"']),
    ({"logit_bias": {"five": 1}}, ["token ids", '"five"']),
    ({"logit_bias": {"99999": 1}}, ["token ids in [0, ", "99999"]),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, ["1024", "1025"]),
    ({"logit_bias": [1]}, ["object", "[1]"]),
    ({"seed": 1.5}, ["integer", "1.5"]),
    ({"seed": 2**64}, ["seed must be in [-9223372036854775808, 18446744073709551615], got 18446744073709551616"]),
    ({"seed": -(2**63) - 1}, ["got -9223372036854775809"]),
    ({"seed": 10**200}, ["18446744073709551615", "got 1000000"]),
    ({"top_k": 10**30}, ["[1, 2147483647]", f"got {10**30}"]),
    ({"stop": 5}, ["string or a list", "5"]),
    ({"stop": ""}, ["non-empty"]),
    ({"stop": ["a"] * 17}, ["at most", "17"]),
    ({"stop": ["x" * 1025]}, ["1024", "1025"]),
    ({"stop_token_ids": [-1]}, ["[0, ", "-1"]),
    ({"stop_token_ids": [10**6]}, ["[0, ", "1000000"]),
    ({"stop_token_ids": [2**64]}, ["[0, ", f"got {2**64}"]),
    ({"stop_token_ids": [1] * 1025}, ["stop_token_ids must have at most 1024 entries, got 1025"]),
    ({"stop_token_ids": ["1"]}, ["integer", '"1"']),
    ({"ignore_eos": 1}, ["boolean", "1"]),
    ({"timeout": 0}, ["(0, 86400]", "0"]),
    ({"timeout": -5}, ["(0, 86400]", "-5"]),
    ({"timeout": "5"}, ["number", '"5"']),
    ({"n": 0}, ["at least 1", "0"]),
    ({"n": 129}, ["128", "129"]),
    ({"n": "2"}, ["integer", '"2"']),
    ({"n": 10**30}, ["at most 128", f"got {10**30}"]),
    ({"max_tokens": 10**30}, ["[1, 32768]", f"got {10**30}"]),
    ({"max_tokens": -1}, ["[", "32768]", "-1"]),
    ({"max_tokens": 32769}, ["32768", "32769"]),
    ({"max_tokens": "5"}, ["integer", '"5"']),
    ({"max_tokens": 5.0}, ["integer", "5.0"]),
    ({"max_tokens": True}, ["integer", "true"]),
    ({"stream": "yes"}, ["boolean", '"yes"']),
    ({"stream_options": {"include_usage": True}}, ["stream: true"]),
    ({"model": 5}, ["string", "5"]),
    ({"functions": [{}]}, ["not supported"]),
    ({"modalities": ["text", "audio"]}, ["not supported", "audio"]),
    ({"audio": {}}, ["not supported", "{}"]),
    ({"store": True}, ["not supported", "true"]),
    ({"store": 0}, ["not supported", "0"]),
    ({"stream_options": {"a": 1}}, ["unknown field", '"a"']),
    ({"user": 5}, ["user must be a string, got 5"]),
    ({"service_tier": ["auto"]}, ["service_tier must be a string"]),
    ({"prompt_cache_key": False}, ["prompt_cache_key must be a string, got false"]),
    ({"parallel_tool_calls": 1}, ["parallel_tool_calls must be a boolean (true or false), got 1"]),
    ({"metadata": "x"}, ["metadata must be a JSON object"]),
    ({"metadata": {"a": 1}}, ["metadata.a must be a string, got 1"]),
    ({"metadata": {str(n): "" for n in range(17)}}, ["at most 16 pairs, got 17"]),
    ({"suffix": "end"}, ["not supported", '"end"']),
    ({"reasoning_effort": "huge"}, ["reasoning_effort must be one of", '"huge"']),
    ({"temprature": 0.5}, ["unknown field", "temprature", "did you mean temperature?"]),
    ({"x" * 1000: 1}, ["unknown field"]),
]
BAD_COMPLETION: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompt": []}, ["an empty list"]),
    ({"prompt": [[]]}, ["list of token ids"]),
    ({"prompt": [[1], []]}, ["list of token ids"]),
    ({"prompt": 5}, ["a string", "5"]),
    ({"prompt": {"text": "x"}}, ["a string"]),
    ({"prompt": [1, "x"]}, ["a string"]),
    ({"prompt": [1.5]}, ["a string", "1.5"]),
    ({"prompt": [True]}, ["a string", "true"]),
    ({"prompt": [-1]}, ["[0, ", "-1"]),
    ({"prompt": [1, 10**9]}, ["[0, ", "1000000000"]),
    ({"prompt": [1, 2**64]}, ["[0, ", f"got {2**64}"]),
    ({"prompt": "x" * 40_000}, ["at most 1000 tokens", "at least"]),
    ({"prompt": "ab " * 900}, ["at most 1000 tokens"]),
    ({"prompt": [1] * 1001}, ["at most 1000 tokens", "1001"]),
    ({"prompt": ["x"] * 129}, ["128", "129"]),
    ({"prompt": None}, ["required"]),
    ({"logprobs": 21}, ["[0, 20]", "21"]),
    ({"logprobs": -1}, ["[0, 20]", "-1"]),
    ({"logprobs": True}, ["integer", "true"]),
    ({"best_of": 1, "n": 2}, ["at least n (2)", "1"]),
    ({"best_of": 100_000}, ["at most", "100000"]),
    ({"best_of": 2, "stream": True}, ["stream"]),
    ({"echo": "yes"}, ["boolean", '"yes"']),
    ({"max_tokens": 0}, ["[1, 32768]", "0"]),
]
BAD_CHAT: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": []}, ["messages must have at least 1 entry, got 0"]),
    ({"messages": None}, ["required"]),
    ({"messages": "hello"}, ["list", '"hello"']),
    ({"top_logprobs": 5}, ["logprobs: true"]),
    ({"logprobs": 5}, ["boolean", "5"]),
    ({"max_completion_tokens": 0}, ["[1, 32768]", "0"]),
    ({"messages": [{"role": "user", "content": "ab " * 900}]}, ["at most 1000 tokens"]),
]


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), max_prompt_tokens=1000, max_body_bytes=100_000) as opened:
        yield opened


def first_key(fields: dict[str, Any]) -> str:
    return next(iter(fields))[:24] + "=" + json.dumps(next(iter(fields.values())), default=str)[:16]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "words"), BAD_SAMPLING, ids=[first_key(fields) for fields, _ in BAD_SAMPLING])
async def test_bad_sampling_fields(server: Gateway, path: str, fields: dict[str, Any], words: list[str]) -> None:
    start = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO}
    error = await assert_refused(server, await server.client.post(path, json={**start, **fields}), 400, words)
    name = next(iter(fields))
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].partition(".")[0].partition("[")[0] == name


@pytest.mark.parametrize(("fields", "words"), BAD_COMPLETION, ids=[first_key(fields) for fields, _ in BAD_COMPLETION])
async def test_bad_completion_fields(server: Gateway, fields: dict[str, Any], words: list[str]) -> None:
    response = await server.client.post(COMPLETIONS, json={"prompt": "hello", **fields})
    error = await assert_refused(server, response, 400, words)
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(("fields", "words"), BAD_CHAT, ids=[first_key(fields) for fields, _ in BAD_CHAT])
async def test_bad_chat_fields(server: Gateway, fields: dict[str, Any], words: list[str]) -> None:
    response = await server.client.post(CHAT, json={"messages": HELLO, **fields})
    error = await assert_refused(server, response, 400, words)
    assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "tool", "content": "x"}, "messages[1]", ["tool_call_id"]),
        ({"role": "critic", "content": "x"}, "messages[1].role", ["'user'", '"critic"']),
        ({"role": "user"}, "messages[1].content", ["required"]),
        ({"role": "user", "content": 5}, "messages[1].content", ["text parts", "5"]),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content", ["image_url"]),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content", ["5"]),
        ({"role": "user", "content": []}, "messages[1].content", ["text parts", "[]"]),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls", ["calls of functions"]),
        ({"role": "user", "content": "x", "nmae": "y"}, "messages[1].nmae", ["unknown field"]),
        ("hello", "messages[1]", ["object", '"hello"']),
    ],
    ids=str,
)
async def test_bad_messages(server: Gateway, message: Any, param: str, words: list[str]) -> None:
    response = await server.client.post(CHAT, json={"messages": [*HELLO, message]})
    error = await assert_refused(server, response, 400, words)
    assert error["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_an_unknown_model_is_not_found(server: Gateway, path: str) -> None:
    start = {
        COMPLETIONS: {"prompt": "x"},
        CHAT: {"messages": HELLO},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }[path]
    response = await server.client.post(path, json={"model": "gpt-9", **start})
    error = await assert_refused(server, response, 404, ["'gpt-9'", "'fake-nsm'"])
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_query_parameters_are_as_strict_as_bodies(server: Gateway) -> None:
    for call, hint in (("/v1/sessions?limti=5", "'limti'; did you mean limit?"), ("/v1/models?x=1", "'x'")):
        error = await assert_refused(server, await server.client.get(call), 400, [f"unknown query parameter {hint}"])
        assert error["code"] == "unknown_parameter"
    response = await server.client.post(f"{COMPLETIONS}?temperature=0", json={"prompt": "x"})
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
    assert (await server.client.get("/health?x=1")).status_code == 200  # probes may add what they like


async def test_a_long_id_is_cut_where_that_can_be_seen(server: Gateway) -> None:
    response = await server.client.get(f"/v1/sessions/{'x' * 200}")
    await assert_refused(server, response, 404, [f"session '{'x' * 80}'… does not exist"])


async def test_a_field_in_an_object_is_named_with_its_way(server: Gateway) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"a": 1}}
    error = await assert_refused(server, await server.client.post(COMPLETIONS, json=body), 400, ["unknown field"])
    assert (error["param"], error["code"]) == ("stream_options.a", "unknown_parameter")


async def test_routes_and_methods_that_do_not_exist(server: Gateway) -> None:
    await assert_refused(server, await server.client.get("/v2/nothing"), 404, ["GET /v2/nothing"])
    response = await server.client.get(COMPLETIONS)
    await assert_refused(server, response, 405, [f"GET is not allowed at {COMPLETIONS}, only POST"])
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/sessions", "GET, HEAD, POST"),
        ("PUT", "/v1/states", "GET, HEAD, POST"),
        ("PATCH", "/v1/states/x", "DELETE, GET, HEAD"),
        ("PUT", "/v1/sessions/x", "DELETE, GET, HEAD, PATCH"),
    ],
)
async def test_method_that_a_path_does_not_have_is_refused_with_all_that_it_has(
    server: Gateway, method: str, path: str, allowed: str
) -> None:
    response = await server.client.request(method, path, json={})
    await assert_refused(server, response, 405, [f"{method} is not allowed at {path}, only {allowed}"])
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, '{"prompt": "x", "seed": 18446744073709551616}',
         "seed must be in [-9223372036854775808, 18446744073709551615], got 18446744073709551616"),
        ("/v1/sessions/s/generate", '{"seed": -9223372036854775809}',
         "seed must be in [-9223372036854775808, 18446744073709551615], got -9223372036854775809"),
        ("/v1/sessions/s/clear", f'{{"mark": {2**70}}}', f"mark must be at most 9223372036854775807, got {2**70}"),
        (COMPLETIONS, f'{{"prompt": [1, {2**70}]}}', f"], got {2**70}"),
        (COMPLETIONS, f'{{"prompt": [[1], [{-2**70}]]}}', f"], got {-2**70}"),
        ("/v1/sessions/s/generate", f'{{"input": [{2**70}]}}', f"], got {2**70}"),
        ("/v1/embeddings", f'{{"model": "fake-nsm", "input": [[{2**70}]]}}', f"], got {2**70}"),
        ("/v1/sessions/s/clear", '{"mark": 1e30}', "mark must be an integer, got 1e+30"),
    ],
)  # fmt: skip
async def test_integer_of_more_than_64_bits_is_refused_by_the_range_as_it_was_sent(
    server: Gateway, path: str, body: str, message: str
) -> None:
    await server.client.post("/v1/sessions", json={"id": "s"})
    response = await server.client.post(path, content=body, headers={"content-type": "application/json"})
    await assert_refused(server, response, 400, [message])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_harmless_fields_and_nulls_change_nothing(server: Gateway, path: str) -> None:
    start = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO}
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "seed": None,
        "stop": None,
        "logit_bias": None,
        "stream_options": None,
        "functions": None,
    }
    response = await server.client.post(path, json={**start, **ignored})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("given", "used"), [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63), (7, 7)]
)
async def test_any_64_bit_seed_is_taken(given: int, used: int) -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        response = await server.client.post(COMPLETIONS, json={"prompt": "x", "seed": given})
        assert response.status_code == 200
    assert backend.requests[0].sampling.seed == used


async def test_without_a_seed_one_is_drawn_for_all_choices() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        for _ in range(2):
            await server.client.post(COMPLETIONS, json={"prompt": "x", "n": 2})
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert [request.sampling.choice_index for request in backend.requests] == [0, 1, 0, 1]
