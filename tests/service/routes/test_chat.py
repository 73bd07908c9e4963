from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from nsm_core.errors import Overloaded
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import Gateway, frames_of, gateway

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def chat(server: Gateway, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(server: Gateway, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(PATH, json={"messages": HELLO, "stream": True, **body})
    return frames_of(response.text)


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(" " + DEFAULT_SCRIPT)) as opened:
        yield opened


async def test_the_stock_client_chats() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        answer = await server.openai.chat.completions.create(
            model="fake-nsm",
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
            n=2,
            logprobs=True,
            top_logprobs=1,
        )
        again = await server.openai.chat.completions.create(
            model="fake-nsm",
            messages=[{"role": "user", "content": "hi"}, answer.choices[0].message.model_dump()],  # type: ignore[list-item]
        )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in answer.choices] == [DEFAULT_SCRIPT] * 2
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert again.choices[0].finish_reason == "stop"
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content) == DEFAULT_SCRIPT
        assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content) == DEFAULT_SCRIPT.encode()
        assert all(len(token.top_logprobs) == 1 for token in choice.logprobs.content)


async def test_the_stock_client_streams_a_chat() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        chunks = [
            chunk
            async for chunk in await server.openai.chat.completions.create(
                model="fake-nsm",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == DEFAULT_SCRIPT
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "chat.completion.chunk")
    }
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_S4_role_first_then_content_then_one_empty_delta_with_the_reason(
    server: Gateway, num_choices: int
) -> None:
    frames = await stream(server, n=num_choices, max_tokens=4)
    for index in range(num_choices):
        parts = [part for frame in frames for part in frame["choices"] if part["index"] == index]
        first, *middle, last = parts
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert [part["delta"]["content"] for part in middle] == ["It", " was", " the"]
        assert last == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "length"}
        assert all(part["finish_reason"] is None for part in parts[:-1])
        assert all(set(part["delta"]) == {"content"} for part in middle)


@pytest.mark.parametrize("is_asked", [True, False])
async def test_S3_usage_comes_only_when_asked_for(server: Gateway, is_asked: bool) -> None:
    whole = await chat(server)
    frames = await stream(server, stream_options={"include_usage": is_asked})
    assert frames[-1].get("usage") == (whole["usage"] if is_asked else None)
    assert all(("usage" in frame) is is_asked for frame in frames)
    assert all(frame.get("usage") is None for frame in frames[:-1])
    assert [frame["choices"] == [] for frame in frames] == [False] * (len(frames) - 1) + [is_asked]


async def test_every_chunk_has_the_counts_so_far_where_they_are_asked_for(server: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = await stream(server, max_tokens=3, stream_options=options)
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    last = frames[-1]["usage"]
    assert {frame["usage"]["prompt_tokens"] for frame in frames} == {last["prompt_tokens"]}
    assert all(
        frame["usage"]["total_tokens"] == last["prompt_tokens"] + count
        for frame, count in zip(frames, counts, strict=True)
    )


@pytest.mark.parametrize("script", [" Yes.", "Yes.", "  two spaces", " ", "\n x", " 日本"])
@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_S1_the_space_after_the_speaker_belongs_to_the_template(script: str, has_logprobs: bool) -> None:
    async with gateway(FakeBackend(script)) as server:
        whole = await chat(server, logprobs=has_logprobs)
        frames = await stream(server, logprobs=has_logprobs)
    pieces = [part for frame in frames for part in frame["choices"]]
    assert whole["choices"][0]["message"]["content"] == script.removeprefix(" ")
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == script.removeprefix(" ")
    if has_logprobs:
        shown = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["content"]]
        assert shown == whole["choices"][0]["logprobs"]["content"]
        assert bytes(value for token in shown for value in token["bytes"]) == script.removeprefix(" ").encode()


async def test_the_chat_is_read_as_the_template_says() -> None:
    backend = FakeBackend()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "<|endoftext|>"}]},
        {"role": "assistant", "content": "two", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    async with gateway(backend) as server:
        await chat(server, messages=messages, stop="\n")
    request = backend.requests[0]
    text = "Be brief.\n\nUser: one\n<|endoftext|>\n\nAssistant: two\n\nUser: \n\nAssistant:"
    assert request.prompt_ids == (0, *backend.tokenizer.encode(text))
    assert request.prompt_ids.count(0) == 1
    assert request.sampling.stop == ("\n", "\n\nUser:", "\nUser:")


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 256),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
    ids=str,
)
async def test_either_name_of_max_tokens(fields: dict[str, int], max_tokens: int) -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        await chat(server, **fields)
        differ = await server.client.post(PATH, json={"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2})
    assert backend.requests[0].sampling.max_tokens == max_tokens
    assert differ.status_code == 400


async def test_logprobs_without_alternatives() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        await chat(server, logprobs=True)
        await chat(server, logprobs=True, top_logprobs=4)
        await chat(server)
    assert [request.sampling.logprobs for request in backend.requests] == [0, 4, None]


async def test_the_stock_client_tries_again_when_told_to() -> None:
    class BusyOnce(FakeBackend):
        def submit(self, request: Any) -> Any:
            if not self.requests:
                self.requests.append(request)
                raise Overloaded("full", retry_after_s=0.1)
            return super().submit(request)

    async with gateway(BusyOnce(), is_live=True) as server:
        patient = server.openai.with_options(max_retries=1)
        answer = await patient.chat.completions.create(model="fake-nsm", messages=[{"role": "user", "content": "x"}])
        assert answer.choices[0].message.content == DEFAULT_SCRIPT


async def test_the_stock_client_knows_an_unknown_model() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        with pytest.raises(openai.NotFoundError) as caught:
            await server.openai.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
