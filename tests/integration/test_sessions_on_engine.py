"""Sessions, chats and conversations on real engines, here and in Triton: forks, retries, rewinds. A random model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.backends import MakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.responses import respond, text_of

SAMPLED = {"max_tokens": 12, "temperature": 1.0, "repetition_penalty": 1.3, "ignore_eos": True, "logprobs": 0}


@pytest.fixture
async def server(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(), is_live=True) as opened:
        await call(opened, "/v1/sessions", id="s")
        yield opened


async def post(server: Gateway, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await server.client.post(path, json=body, headers=headers)


async def call(server: Gateway, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    response = await post(server, path, headers, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def say(server: Gateway, text: str, session_id: str = "s", **body: Any) -> dict[str, Any]:
    """Its text with what was sampled, and where the session stands."""
    answer = await call(server, f"/v1/sessions/{session_id}/generate", input=text, **{**SAMPLED, **body})
    session = {name: answer["session"][name] for name in ("version", "position")}
    return {"choices": answer["choices"], "usage": answer["usage"], "session": session}


async def test_P5_a_fork_and_its_origin_say_the_same_and_go_their_ways(server: Gateway) -> None:
    await say(server, "Once", seed=3)
    await call(server, "/v1/sessions/s/fork", id="fork")
    assert await say(server, " and then") == await say(server, " and then", "fork")
    assert await say(server, " left") != await say(server, " right", "fork")


async def test_a_rewind_says_again_what_was_said(server: Gateway) -> None:
    await say(server, "Once", seed=3)
    said = [await say(server, text) for text in (" and then", " at last")]
    await call(server, "/v1/sessions/s/rewind", to_version=1)
    again = [await say(server, text) for text in (" and then", " at last")]
    # the state is made again in chunks, which rounds it in another order: the text is the same to the last token
    assert [turn["choices"][0]["text"] for turn in again] == [turn["choices"][0]["text"] for turn in said]
    assert [turn["session"]["position"] for turn in again] == [turn["session"]["position"] for turn in said]


async def test_D9_a_retry_gets_the_turn_that_was_done(server: Gateway) -> None:
    """Without a seed, a second run would say something else."""
    path, key = "/v1/sessions/s/generate", {"Idempotency-Key": "k"}
    first = await call(server, path, key, input="Once", **SAMPLED)
    generated = server.metric("nsm_tokens_generated_total")
    assert await call(server, path, key, input="Once", **SAMPLED) == first
    assert server.metric("nsm_tokens_generated_total") == generated
    other = await post(server, path, key, input="Twice", **SAMPLED)
    assert (other.status_code, error_of(other)["type"]) == (422, "invalid_request_error")
    assert (await server.client.get("/v1/sessions/s")).json()["version"] == 1


async def test_S1_a_chat_stream_says_what_the_answer_in_one_piece_says(server: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "Once?"}], "seed": 5, "max_tokens": 40, "temperature": 1.0}
    whole = (await call(server, "/v1/chat/completions", **body))["choices"][0]
    frames = frames_of((await post(server, "/v1/chat/completions", stream=True, **body)).text)
    pieces = [frame["choices"][0]["delta"].get("content", "") for frame in frames]
    assert len(pieces) > 3
    assert "".join(pieces) == whole["message"]["content"]
    assert frames[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


async def test_P7_a_conversation_is_the_chain_of_its_responses(server: Gateway) -> None:
    fields = {"max_output_tokens": 8, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    name = (await call(server, "/v1/conversations"))["id"]
    said, chained, before = [], [], None
    for text in ("one", "two", "three"):
        said.append(text_of(await respond(server, text, conversation=name, **fields)))
        response = await respond(server, text, previous_response_id=before, **fields)
        before = response["id"]
        chained.append(text_of(response))
    assert said == chained
