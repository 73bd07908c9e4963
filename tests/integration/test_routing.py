"""What the states did, in the answers of a gateway that was asked for it: see docs/inspection.md."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.routing import MAX_ROUTED_REQUESTS, MAX_ROUTED_TOKENS, TOP_STATES
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_request
from tests.support.backends import triton_backend
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.models import local_backend
from tests.support.triton_servers import RunningTriton

SAMPLED = {"seed": 1, "ignore_eos": True, "repetition_penalty": 1.3, "max_tokens": 12}
COMPLETION = ("/v1/completions", {"prompt": "Once upon a time"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}]})
TURN = ("/v1/sessions/s/generate", {"input": "Once upon a time"})
FACES = pytest.mark.parametrize(("path", "options"), [COMPLETION, CHAT, TURN], ids=["completion", "chat", "turn"])


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    async with gateway(local_backend(tiny_tokenizer, pattern="NW"), is_live=True) as opened:
        await opened.client.post("/v1/sessions", json={"id": "s"})
        yield opened


async def ask(server: Gateway, path: str, options: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = await server.client.post(path, json={**SAMPLED, **options, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def check_entry(entry: dict[str, Any]) -> None:
    assert list(entry) == ["token_id", "position", "layers"]
    assert [(layer["layer"], layer["kind"]) for layer in entry["layers"]] == [("0", "slots")]
    for layer in entry["layers"]:
        assert set(layer) == {
            "layer", "kind", "num_states", "num_heads", "entropy", "states_per_token", "write", "read"
        }  # fmt: skip
        for weights in (layer["write"], layer["read"]):
            assert 0 < len(weights) <= TOP_STATES
            assert all(0 <= state < layer["num_states"] and weight > 0 for state, weight in weights)
        assert sum(weight for _, weight in layer["read"]) == pytest.approx(layer["num_heads"], abs=1e-3)


@FACES
async def test_an_answer_tells_what_the_states_did_for_each_token(
    server: Gateway, path: str, options: dict[str, Any]
) -> None:
    answer = await ask(server, path, options, include_routing=True)
    (choice,) = answer["choices"]
    assert len(choice["routing"]) == 12
    start = answer["usage"]["prompt_tokens"]
    assert [entry["position"] for entry in choice["routing"]] == list(range(start, start + 12))
    for entry in choice["routing"]:
        check_entry(entry)


@FACES
async def test_S1_a_streams_entries_joined_are_those_of_the_answer_in_one_piece(
    server: Gateway, path: str, options: dict[str, Any]
) -> None:
    await server.client.post("/v1/sessions", json={"id": "t"})
    whole = (await ask(server, path, options, include_routing=True))["choices"][0]
    body = {**SAMPLED, **options, "include_routing": True, "stream": True}
    response = await server.client.post(path.replace("/s/", "/t/"), json=body)
    pieces = [frame["choices"][0] for frame in frames_of(response.text)]
    assert all("routing" in piece for piece in pieces)
    assert [entry for piece in pieces for entry in piece["routing"]] == whole["routing"]
    texts = (piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces)
    assert "".join(texts) == text_of(whole)


@FACES
async def test_who_does_not_ask_gets_the_same_text_and_no_field(
    server: Gateway, path: str, options: dict[str, Any]
) -> None:
    await server.client.post("/v1/sessions", json={"id": "t"})
    routed = (await ask(server, path, options, include_routing=True))["choices"][0]
    plain = (await ask(server, path.replace("/s/", "/t/"), options))["choices"][0]
    assert text_of(plain) == text_of(routed)
    assert "routing" not in plain


async def test_choices_have_lists_of_their_own_and_logprobs_go_along(server: Gateway) -> None:
    answer = await ask(server, *COMPLETION, include_routing=True, logprobs=1, n=2, echo=True)
    for choice in answer["choices"]:
        ids = [entry["token_id"] for entry in choice["routing"]]
        texts = [server.services.backend.tokenizer.decode([token_id]) for token_id in ids]
        assert len(texts) == 12 < len(choice["logprobs"]["tokens"])


async def test_a_token_that_a_stop_string_took_has_no_entry(server: Gateway) -> None:
    whole = (await ask(server, *COMPLETION, include_routing=True))["choices"][0]
    stop = next(char for char in whole["text"][2:] if char != "\ufffd" and char not in whole["text"][:2])
    cut = (await ask(server, *COMPLETION, include_routing=True, stop=stop))["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["routing"] == whole["routing"][: len(cut["routing"])]
    assert len(cut["routing"]) < 12


async def test_P10_wishes_above_the_limits_are_refused_by_name(server: Gateway) -> None:
    path, options = COMPLETION
    for body, param in (
        ({"max_tokens": MAX_ROUTED_TOKENS + 1}, "max_tokens"),
        ({"max_tokens": MAX_ROUTED_TOKENS // 2 + 1, "n": 2}, "max_tokens"),
        ({"max_tokens": 1, "n": MAX_ROUTED_REQUESTS + 1}, "include_routing"),
    ):
        response = await server.client.post(path, json={**options, **body, "include_routing": True})
        assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_more_requests_than_may_be_watched_at_a_time_are_turned_away(tiny_tokenizer: Tokenizer) -> None:
    backend = local_backend(tiny_tokenizer)
    async with gateway(backend, is_live=True) as server:
        path, options = COMPLETION
        body = {
            **SAMPLED,
            **options,
            "include_routing": True,
            "n": MAX_ROUTED_REQUESTS,
            "max_tokens": 100,
            "stream": True,
        }
        async with server.client.stream("POST", path, json=body):
            refused = await server.client.post(path, json={**options, "include_routing": True})
            assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
            assert (error_of(refused)["param"], refused.headers["retry-after"]) == ("include_routing", "1")
            assert (await server.client.post(path, json={**options, "max_tokens": 1})).status_code == 200


async def test_a_stream_of_the_past_has_tokens_without_entries(server: Gateway) -> None:
    path, options = TURN
    body = {**SAMPLED, **options, "include_routing": True}
    headers = {"idempotency-key": "k"}
    first = (await server.client.post(path, json=body, headers=headers)).json()["choices"][0]
    again = (await server.client.post(path, json=body, headers=headers)).json()["choices"][0]
    assert (again["text"], again["routing"]) == (first["text"], [])


async def test_routing_of_past_tokens_is_that_of_their_turn(server: Gateway) -> None:
    path, options = TURN
    turn = (await server.client.post(path, json={**SAMPLED, **options, "include_routing": True})).json()
    query = {"recent": 512, "tokens": "true"}
    recent = (await server.client.get(path.replace("generate", "states"), params=query)).json()["recent"]
    by_position = {token["position"]: token for token in recent["tokens"]}
    sampled = turn["choices"][0]["routing"][1:]  # that of the first depends on the split of the prompt
    assert len(recent["tokens"]) == recent["num_tokens"]
    for entry in sampled:
        again = by_position[entry["position"] - 1]  # a token comes out of the reading of the one before it
        for layer, other in zip(entry["layers"], again["layers"], strict=True):
            assert dict(layer["write"]) == pytest.approx(dict(other["write"]), abs=0.01)


@pytest.mark.triton
async def test_P10_servers_of_triton_are_not_asked(triton: RunningTriton) -> None:
    backend = triton_backend(triton)
    await backend.start()
    try:
        with pytest.raises(InvalidRequest, match="not supported with Triton") as refused:
            backend.submit(dataclasses.replace(make_request(), include_routing=True))
        assert refused.value.param == "include_routing"
        with pytest.raises(InvalidRequest, match="recent is not supported"):
            await backend.inspect_text(None, (1,))
    finally:
        await backend.stop()
