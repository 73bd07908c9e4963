from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, TokenEvent
from nsm_core.errors import DeadlineExceeded, EngineDead, InvalidRequest, NsmError, Overloaded
from nsm_core.tokenizer import IncrementalDecoder
from tests.support.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.support.gateway import Gateway, error_of, frames_of, gateway
from tests.support.samples import naughty_strings

PATH = "/v1/completions"
EMOJI_SCRIPT = "né 日本 👩‍👩‍👧 e\u0301 end"


async def complete(server: Gateway, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(server: Gateway, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(PATH, json={"prompt": "hi", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    return frames_of(response.text)


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend()) as opened:
        yield opened


async def test_the_stock_client_completes() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        answer = await server.openai.completions.create(model="fake-nsm", prompt="Once", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint == "fp_fake-fingerp_fake"
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(DEFAULT_SCRIPT, "stop")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == 1 + len(FakeBackend().tokenizer.encode("Once"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_the_stock_client_streams() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        chunks = [
            chunk
            async for chunk in await server.openai.completions.create(
                model="fake-nsm", prompt="Once", max_tokens=100, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == DEFAULT_SCRIPT
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == 15


@pytest.mark.parametrize(
    "body", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}], ids=str
)
@pytest.mark.parametrize("script", [DEFAULT_SCRIPT, EMOJI_SCRIPT], ids=["ascii", "emoji"])
async def test_S1_deltas_joined_equal_the_answer_in_one_piece(script: str, body: dict[str, Any]) -> None:
    prompts = ["héllo", "a\u0301b"]
    async with gateway(FakeBackend(script)) as server:
        whole = await complete(server, prompt=prompts, max_tokens=64, **body)
        frames = await stream(server, prompt=prompts, max_tokens=64, **body)
    for choice in whole["choices"]:
        pieces = [part for frame in frames for part in frame["choices"] if part["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert "\ufffd" not in choice["text"]
        if choice["logprobs"] is not None:
            parts = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
            for key, values in choice["logprobs"].items():
                assert [value for part in parts for value in part[key]] == values


async def test_S1_a_cut_character_at_the_end_shows_once(server: Gateway) -> None:
    async with gateway(FakeBackend("日")) as cut:
        for max_tokens, text in ((1, "\ufffd"), (2, "\ufffd"), (3, "日")):
            assert (await complete(cut, max_tokens=max_tokens))["choices"][0]["text"] == text
            frames = await stream(cut, max_tokens=max_tokens)
            assert "".join(frame["choices"][0]["text"] for frame in frames) == text


@pytest.mark.parametrize("is_asked", [True, False])
async def test_S3_usage_comes_only_when_asked_for(server: Gateway, is_asked: bool) -> None:
    whole = await complete(server, n=2)
    frames = await stream(server, n=2, stream_options={"include_usage": is_asked})
    if is_asked:
        assert frames[-1]["choices"] == []
        assert frames[-1]["usage"] == whole["usage"]
        assert all(frame["usage"] is None and frame["choices"] for frame in frames[:-1])
    else:
        assert all("usage" not in frame and frame["choices"] for frame in frames)


async def test_every_chunk_has_the_counts_so_far_where_they_are_asked_for(server: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = await stream(server, n=2, max_tokens=3, stream_options=options)
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    last = frames[-1]["usage"]
    assert {frame["usage"]["prompt_tokens"] for frame in frames} == {last["prompt_tokens"]}
    assert all(
        frame["usage"]["total_tokens"] == last["prompt_tokens"] + count
        for frame, count in zip(frames, counts, strict=True)
    )


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (100, "stop")])
async def test_S4_every_choice_ends_with_one_empty_piece_and_its_reason(
    server: Gateway, max_tokens: int, reason: str
) -> None:
    frames = await stream(server, n=2, max_tokens=max_tokens)
    for index in (0, 1):
        pieces = [part for frame in frames for part in frame["choices"] if part["index"] == index]
        assert pieces[-1] == {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        assert all(piece["finish_reason"] is None and piece["text"] for piece in pieces[:-1])


async def test_S4_an_error_in_mid_stream_is_one_frame_and_the_stock_client_raises_it() -> None:
    backend = FakeBackend(fail_after=3, error=DeadlineExceeded("the deadline passed"))
    async with gateway(backend, is_live=True) as server:
        frames = await stream(server)
        assert [frame for frame in frames if "error" in frame] == [frames[-1]]
        assert frames[-1]["error"]["code"] == "deadline_exceeded"
        texts = []
        with pytest.raises(openai.APIError, match="the deadline passed"):
            async for chunk in await server.openai.completions.create(model="fake-nsm", prompt="x", stream=True):
                texts.append(chunk.choices[0].text)
    assert texts == ["It", " was", " the"]


async def test_S4_an_unexpected_error_in_mid_stream_tells_nothing_of_the_inside() -> None:
    class BrokenBackend(FakeBackend):
        def submit(self, request: GenerationRequest) -> Any:
            generation = super().submit(request)

            async def events() -> AsyncIterator[Event]:
                yield TokenEvent(index=1, token_id=1, text="x")
                raise ValueError("the secret is 42")

            generation.events = events  # type: ignore[method-assign]
            return generation

    async with gateway(BrokenBackend()) as server:
        frames = await stream(server)
        whole = await server.client.post(PATH, json={"prompt": "x"}, headers={"x-request-id": "my-id"})
    assert frames[-1]["error"]["code"] == "internal_error"
    assert whole.status_code == 500
    assert "my-id" in error_of(whole)["message"]
    assert "secret" not in whole.text + str(frames)


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (Overloaded("full", retry_after_s=3), 503, openai.InternalServerError, {"retry-after": "3"}),
        (EngineDead("dead"), 503, openai.InternalServerError, {"retry-after": "1"}),
        (InvalidRequest("bad", param="prompt"), 400, openai.BadRequestError, {}),
    ],
    ids=["overloaded", "dead", "invalid"],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_has_a_real_status_streamed_or_not(
    error: NsmError, status: int, kind: type[openai.APIStatusError], headers: dict[str, str], is_stream: bool
) -> None:
    backend = FakeBackend()
    backend.refusal = error
    async with gateway(backend, is_live=True) as server:
        with pytest.raises(kind) as caught:
            await server.openai.completions.create(model="fake-nsm", prompt="x", stream=is_stream)
        assert caught.value.status_code == status
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        assert {name: caught.value.response.headers.get(name) for name in headers} == headers


async def test_when_one_of_many_choices_is_refused_none_runs() -> None:
    class SmallBackend(FakeBackend):
        def submit(self, request: GenerationRequest) -> Any:
            if len(self.running) == 2:
                raise Overloaded("full")
            return super().submit(request)

    backend = SmallBackend(hold=True)
    async with gateway(backend) as server:
        response = await server.client.post(PATH, json={"prompt": "x", "n": 3})
        assert response.status_code == 503
        assert backend.running == set()
        assert server.metric("nsm_request_success_total", finished_reason="abort_before_first_token") == 2


async def test_when_one_of_many_choices_fails_the_others_are_stopped() -> None:
    class HalfBrokenBackend(FakeBackend):
        def submit(self, request: GenerationRequest) -> Any:
            generation = super().submit(request)
            if request.sampling.choice_index == 1:

                async def events() -> AsyncIterator[Event]:
                    yield Finished(reason=FinishReason.ERROR, error=DeadlineExceeded("too late"))

                generation.events = events  # type: ignore[method-assign]
                self.running.discard(generation)
            return generation

    backend = HalfBrokenBackend(hold=True)
    async with gateway(backend) as server:
        response = await server.client.post(PATH, json={"prompt": "x", "n": 2})
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        assert backend.running == set()


async def test_prompts_of_every_kind() -> None:
    backend = FakeBackend()
    encode, start = backend.tokenizer.encode, backend.tokenizer.end_of_text_id
    async with gateway(backend) as server:
        for prompt in ("", "hi", ["hi", ""], [5, 6], [[5], [6, 7]]):
            backend.requests.clear()
            answer = await complete(server, prompt=prompt, n=2, max_tokens=1)
            many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
            ids = [tuple([start, *encode(one)] if isinstance(one, str) else one) for one in many]
            assert [request.prompt_ids for request in backend.requests] == [one for one in ids for _ in range(2)]
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(many)))
            assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))  # each prompt counts once
            assert answer["usage"]["completion_tokens"] == 2 * len(many)


async def test_echo_gives_the_text_as_it_was_sent() -> None:
    async with gateway(FakeBackend(), max_prompt_tokens=10_000) as server:
        for text in naughty_strings()[::12]:
            answer = await complete(server, prompt=text, echo=True, max_tokens=1)
            assert answer["choices"][0]["text"] == text + "It"


async def test_scoring_a_prompt_as_evaluation_harnesses_do() -> None:
    """Ids, echo, logprobs; and max_tokens 1, whose token they cut off, or 0."""
    async with gateway(FakeBackend()) as server:
        one = (await complete(server, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=1))["choices"][0]
        none = await complete(server, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=0)
    assert one["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert none["choices"][0]["logprobs"] == {key: values[:-1] for key, values in one["logprobs"].items()}
    for logprob, top in zip(one["logprobs"]["token_logprobs"][1:], one["logprobs"]["top_logprobs"][1:], strict=True):
        assert logprob == max(top.values())
    assert none["choices"][0]["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0


async def test_scoring_stops_before_anything_is_generated() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend) as server:
        answer = await complete(server, prompt="abc", echo=True, logprobs=0, max_tokens=0)
        frames = await stream(server, prompt="abc", echo=True, max_tokens=0)
        assert server.metric("nsm_request_success_total", finished_reason="length") == 2
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert [frame["choices"][0]["text"] for frame in frames] == ["abc", ""]
    assert backend.running == set()


async def test_text_offsets_count_characters_of_the_whole_choice() -> None:
    async with gateway(FakeBackend("日本 x")) as server:
        answer = await complete(server, prompt="né ", echo=True, logprobs=0, max_tokens=50)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "né 日本 x"
    decoder, seen = IncrementalDecoder(FakeBackend().tokenizer), 0
    ids = [*FakeBackend().tokenizer.encode("né "), *FakeBackend().tokenizer.encode("日本 x")]
    for token_id, offset in zip(ids, logprobs["text_offset"], strict=True):
        assert offset == seen
        seen += len(decoder.feed(token_id))
    assert seen == len(choice["text"])


async def test_parts_of_characters_are_told_apart_by_their_bytes() -> None:
    async with gateway(FakeBackend("日")) as server:
        answer = await complete(server, logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]


async def test_sampling_fields_reach_the_engine() -> None:
    backend = FakeBackend()
    body = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"5": -100, "6": 1.5},
        "seed": 42,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": 3,
    }
    async with gateway(backend) as server:
        await complete(server, **body)
        await complete(server, stop="one", top_k=-1)
    sampling = backend.requests[0].sampling
    given = {name: getattr(sampling, name) for name in body}
    want = {**body, "logit_bias": {5: -100.0, 6: 1.5}, "stop": ("a", "b"), "stop_token_ids": (9,)}
    assert given == want
    assert (backend.requests[1].sampling.stop, backend.requests[1].sampling.top_k) == (("one",), 0)


async def test_deadlines_count_from_the_arrival() -> None:
    backend = FakeBackend()
    async with gateway(backend, request_timeout_s=1000.0) as server:
        await complete(server)
        await complete(server, timeout=5)
    late, soon = (request.deadline for request in backend.requests)
    assert late is not None
    assert soon is not None
    assert 990 < late - soon < 1000


async def test_prompts_are_logged_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for log_prompts in (False, True):
        async with gateway(FakeBackend(), log_prompts=log_prompts) as server:
            await complete(server, prompt="a secret plan", max_tokens=1)
        assert ("a secret plan" in caplog.text) is log_prompts
