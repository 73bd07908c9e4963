"""Responses on a real engine: a chain is the unbroken run, whatever it is told on the way. A random model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.tokenizer import Tokenizer
from tests.support.backends import MakeBackend
from tests.support.gateway import Gateway, gateway
from tests.support.responses import counts_of, get, log_of, respond, session_ids, stream, text_of

WORDS = ("It was the best of times,", "and then?", "at last!")


@pytest.fixture
async def server(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend()) as opened:
        yield opened


@pytest.fixture(params=[0.0, 1.0], ids=["greedy", "seeded"])
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"temperature": request.param, "seed": 7, "ignore_eos": True}


async def chain(server: Gateway, *words: str, start: str | None = None, **body: Any) -> list[dict[str, Any]]:
    """One response for each word, each after the one before it."""
    responses: list[dict[str, Any]] = []
    for word in words:
        start = responses[-1]["id"] if responses else start
        responses.append(await respond(server, word, previous_response_id=start, max_output_tokens=8, **body))
    return responses


async def session_texts(server: Gateway, **sampling: Any) -> list[str]:
    """What a session of its own says when it is given the same text."""
    await server.client.post("/v1/sessions", json={"id": "plain"})
    texts = []
    for number, word in enumerate(WORDS):
        body = {"input": "\n\n" * (number > 0) + f"User: {word}\n\nAssistant:", "max_tokens": 8, **sampling}
        answer = await server.client.post(
            "/v1/sessions/plain/generate", json={**body, "stop": ["\n\nUser:", "\nUser:"]}
        )
        texts.append(answer.json()["choices"][0]["text"].removeprefix(" "))
    return texts


async def test_P7_a_chain_is_the_session_that_is_given_the_same_text(server: Gateway, sampling: dict[str, Any]) -> None:
    responses = await chain(server, *WORDS, **sampling)
    (session_id,) = await session_ids(server)
    assert [text_of(response) for response in responses] == await session_texts(server, **sampling)
    assert await log_of(server, session_id) == await log_of(server, "plain")


async def test_P2_a_stream_is_the_response(server: Gateway, sampling: dict[str, Any]) -> None:
    whole = await respond(server, WORDS[0], max_output_tokens=24, **sampling)
    events = await stream(server, WORDS[0], max_output_tokens=24, **sampling)
    streamed = events[-1]["response"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(streamed) == text_of(whole)
    assert streamed["usage"] == whole["usage"]
    assert await get(server, streamed["id"]) == streamed


async def test_P4_a_response_that_is_not_stored_says_the_same(server: Gateway, sampling: dict[str, Any]) -> None:
    (root,) = await chain(server, WORDS[0], **sampling)
    (aside,) = await chain(server, WORDS[1], start=root["id"], store=False, **sampling)
    (child,) = await chain(server, WORDS[1], start=root["id"], **sampling)
    (late,) = await chain(server, WORDS[1], start=root["id"], store=False, **sampling)
    assert text_of(aside) == text_of(child) == text_of(late)


async def test_P5_a_fork_goes_on_as_the_first_branch_did(server: Gateway, sampling: dict[str, Any]) -> None:
    responses = await chain(server, *WORDS, **sampling)
    again = await chain(server, *WORDS[1:], start=responses[0]["id"], **sampling)
    assert [text_of(response) for response in again] == [text_of(response) for response in responses[1:]]
    first, second = [await log_of(server, session_id) for session_id in await session_ids(server)]
    assert first == second


async def test_instructions_change_their_own_answer_and_nothing_after_it(
    server: Gateway, sampling: dict[str, Any], tiny_tokenizer: Tokenizer
) -> None:
    """Each turn is the plain run over the ids that it stands on."""
    (one,) = await chain(server, WORDS[0], **sampling)
    (ruled,) = await chain(server, WORDS[1], start=one["id"], instructions="Be brief.", **sampling)
    (free,) = await chain(server, WORDS[2], start=ruled["id"], **sampling)
    (same,) = await chain(server, WORDS[2], start=ruled["id"], instructions="Be brief.", **sampling)
    with_rules, plain = [await log_of(server, session_id) for session_id in await session_ids(server)]
    rules = tuple(tiny_tokenizer.encode("Be brief.\n\n"))
    assert with_rules[: 1 + len(rules)] == (plain[0], *rules)
    assert counts_of(ruled)[1] == 0
    assert counts_of(free)[1] >= counts_of(one)[0]
    assert counts_of(same)[1] >= counts_of(ruled)[0]
    for response, log_ids in ((ruled, with_rules), (same, with_rules), (free, plain)):
        num_read = counts_of(response)[0]
        body = {"prompt": list(log_ids[:num_read]), "max_tokens": 8, **sampling}
        answer = await server.client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"].removeprefix(" ") == text_of(response)
