from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.chat_template import get_template
from nsm_core.tokenizer import END_OF_TEXT, describe
from service.prompts import INLINE_CHARS
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.samples import multilingual_texts, naughty_strings


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend()) as opened:
        yield opened


async def post(server: Gateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_any_text_comes_back_from_its_tokens(server: Gateway) -> None:
    texts = [*naughty_strings()[::6], *list(multilingual_texts().values())[:4], "", "x" * (2 * INLINE_CHARS)]
    for text in texts:
        answer = await post(server, "/tokenize", {"prompt": text})
        assert answer["count"] == len(answer["tokens"])
        assert answer["tokens"][0] == server.services.backend.tokenizer.end_of_text_id
        assert await post(server, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}


async def test_X24_programs_can_ask_for_the_tokenizers_description(server: Gateway) -> None:
    response = await server.client.get("/tokenizer_info")
    assert response.status_code == 200
    info = response.json()
    assert info["eos_token"] == info["bos_token"] == END_OF_TEXT
    backend = server.services.backend
    assert info == describe(get_template(backend.model.chat_template), backend.tokenizer)


async def test_the_count_is_what_a_completion_is_charged(server: Gateway) -> None:
    prompt, messages = "Once upon a time", [{"role": "user", "content": "hello"}]
    completion = await post(server, "/v1/completions", {"prompt": prompt})
    chat = await post(server, "/v1/chat/completions", {"messages": messages})
    counts = [(await post(server, "/tokenize", body))["count"] for body in ({"prompt": prompt}, {"messages": messages})]
    assert counts == [completion["usage"]["prompt_tokens"], chat["usage"]["prompt_tokens"]]


async def test_the_start_token_may_be_left_out(server: Gateway) -> None:
    body = {"prompt": f"hi{END_OF_TEXT}", "return_token_strs": True}
    full = await post(server, "/tokenize", body)
    bare = await post(server, "/tokenize", {**body, "add_special_tokens": False})
    assert full["tokens"] == [0, *bare["tokens"]]
    assert full["token_strs"] == [END_OF_TEXT, *bare["token_strs"]]
    assert 0 not in bare["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": ["x"]}, "prompt", "string"),
        ("/tokenize", {"prompt": "x", "truncate": 5}, "truncate", "unknown"),
        ("/detokenize", {"tokens": "x"}, "tokens", "list"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]", "integer"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "1000000"),
        ("/detokenize", {}, "tokens", "required"),
    ],
)
async def test_bad_bodies(server: Gateway, path: str, body: dict[str, Any], param: str, words: str) -> None:
    response = await server.client.post(path, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]


async def test_no_more_tokens_than_a_prompt_may_have() -> None:
    async with gateway(FakeBackend(), max_prompt_tokens=10) as server:
        assert (await server.client.post("/detokenize", json={"tokens": [5] * 10})).status_code == 200
        response = await server.client.post("/detokenize", json={"tokens": [5] * 11})
        assert response.status_code == 400
        assert error_of(response)["message"] == "tokens must have at most 10 tokens, got 11"


async def test_a_tuned_states_name_stands_for_its_models_tokens(server: Gateway) -> None:
    own = server.services.model_name
    for path, body in (("/tokenize", {"prompt": "Once"}), ("/detokenize", {"tokens": [5, 6]})):
        plain = (await server.client.post(path, json=body)).json()
        assert (await server.client.post(path, json={**body, "model": f"ft:{own}:yes@1"})).json() == plain
        refused = await server.client.post(path, json={**body, "model": "ft:yes"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "model")
        unknown = await server.client.post(path, json={**body, "model": "ft:other:yes"})
        assert (unknown.status_code, error_of(unknown)["param"]) == (404, "model")
