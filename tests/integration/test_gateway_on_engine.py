"""The gateway on real engines, here and in Triton: what the fake cannot show. Random models write random bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.tokenizer import END_OF_TEXT, Tokenizer
from service.generate.openai_format import token_text
from tests.support.backends import MakeBackend
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, frames_of, gateway, until
from tests.support.models import local_backend
from tests.support.raw_http import connect

PATH = "/v1/completions"


@pytest.fixture
async def server(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(), is_live=True) as opened:
        yield opened


async def complete(server: Gateway, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"prompt": "Once", "seed": 1, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream_text(server: Gateway, **body: Any) -> tuple[str, list[str]]:
    """The text, and the tokens whose logprobs were told."""
    fields = {"prompt": "Once", "seed": 1, "ignore_eos": True, "stream": True, "logprobs": 0, **body}
    frames = frames_of((await server.client.post(PATH, json=fields)).text)
    pieces = [frame["choices"][0] for frame in frames]
    tokens = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
    return "".join(piece["text"] for piece in pieces), tokens


@pytest.mark.parametrize("seed", range(4))
async def test_S1_a_stream_says_what_the_answer_in_one_piece_says(server: Gateway, seed: int) -> None:
    whole = (await complete(server, seed=seed, max_tokens=60, logprobs=0))["choices"][0]
    assert await stream_text(server, seed=seed, max_tokens=60) == (whole["text"], whole["logprobs"]["tokens"])
    assert len(whole["logprobs"]["tokens"]) == 60


async def test_S2_every_stop_string_cuts_the_text_where_it_begins(server: Gateway) -> None:
    text = (await complete(server, max_tokens=40))["choices"][0]["text"]
    words = {text[start : start + length] for start in range(3, 30, 5) for length in (1, 2, 4)}
    for stop in sorted(word for word in words if "\ufffd" not in word):
        whole = (await complete(server, max_tokens=40, stop=stop, logprobs=0))["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (text[: text.index(stop)], "stop")
        assert await stream_text(server, max_tokens=40, stop=stop) == (whole["text"], whole["logprobs"]["tokens"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_X10_joined_tokens_equal_the_text_in_completions_chats_and_sessions(
    make_backend: MakeBackend, is_stream: bool
) -> None:
    async with gateway(make_backend(), is_live=True) as server:
        asked = {"seed": 1, "ignore_eos": True, "max_tokens": 30, "stream": is_stream}
        for stop in ["e", "a", "t", " ", "\n", "1", "in", "X"][:: scaled(2, 1)]:
            answer = await answer_of(server, PATH, {**asked, "prompt": "Once", "logprobs": 2, "stop": stop})
            assert joined(answer) == answer[0]
            await server.client.post("/v1/sessions", json={"id": "one"})
            fields = {**asked, "input": "Once", "logprobs": 2, "stop": stop}
            answer = await answer_of(server, "/v1/sessions/one/generate", fields)
            assert joined(answer) == answer[0]
            await server.client.delete("/v1/sessions/one")
            messages = [{"role": "user", "content": "Once"}]
            fields = {**asked, "messages": messages, "logprobs": True, "top_logprobs": 2, "stop": stop}
            answer = await answer_of(server, "/v1/chat/completions", fields)
            assert joined(answer) == answer[0]


async def answer_of(server: Gateway, path: str, body: dict[str, Any]) -> tuple[str, list[bytes]]:
    """The text of the one choice, and the bytes of its tokens, whole or streamed."""
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answers = frames_of(response.text) if body["stream"] else [response.json()]
    text, tokens = "", []
    for choice in (answer["choices"][0] for answer in answers):
        message = choice.get("delta", choice.get("message", {}))
        text += choice.get("text", message.get("content")) or ""
        scored = choice["logprobs"] or {}
        tokens += [bytes(entry["bytes"]) for entry in scored.get("content", [])]
        tokens += [shown_bytes(name) for name in scored.get("tokens", [])]
    return text, tokens


def shown_bytes(name: str) -> bytes:
    """Of a completion's token: those of its name, which spells parts of characters in hexadecimal digits."""
    if name == END_OF_TEXT:
        return b""
    marked = name.removeprefix("bytes:")
    return name.encode() if marked == name else bytes.fromhex(marked.replace("\\x", ""))


def joined(answer: tuple[str, list[bytes]]) -> str:
    return b"".join(answer[1]).decode(errors="replace")


async def test_M5_a_choice_does_not_depend_on_those_beside_it(server: Gateway) -> None:
    """Four choices of two prompts at once, and the same prompt alone: the same text for the same seed and place."""
    batch = await complete(server, prompt=["Once", "Twice"], n=4, max_tokens=20)
    alone = await complete(server, n=4, max_tokens=20)
    one = await complete(server, max_tokens=20)
    texts = [choice["text"] for choice in batch["choices"]]
    assert texts[:4] == [choice["text"] for choice in alone["choices"]]
    assert texts[0] == one["choices"][0]["text"]
    assert len(set(texts)) == 8


async def test_choices_of_one_prompt_read_it_once(server: Gateway) -> None:
    ids = [(7 * number) % 200 + 1 for number in range(80)]
    before = server.services.backend.stats().tokens_computed
    answer = await complete(server, prompt=ids, n=5, max_tokens=4, cache_prompt=False)
    assert answer["usage"]["prompt_tokens"] == 80
    assert answer["usage"]["completion_tokens"] == 20
    assert server.services.backend.stats().tokens_computed - before == 80 + 4


async def test_best_of_answers_with_the_most_likely_choices_of_the_best_first(server: Gateway) -> None:
    made = (await complete(server, n=5, max_tokens=8, logprobs=0))["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in made]
    order = sorted(range(5), key=lambda index: -means[index])
    answer = await complete(server, n=2, best_of=5, max_tokens=8)
    assert [choice["text"] for choice in answer["choices"]] == [made[index]["text"] for index in order[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 40
    scored = await complete(server, prompt=["Once", "Twice"], best_of=5, max_tokens=8, logprobs=1)
    assert [choice["index"] for choice in scored["choices"]] == [0, 1]
    assert scored["choices"][0]["text"] == made[order[0]]["text"]


async def test_what_starts_from_a_state_is_what_follows_the_whole_text(
    server: Gateway, tiny_tokenizer: Tokenizer
) -> None:
    """Named, returned, and in several rows: the same tokens as one prompt of all ids, with the same seed."""
    text = "It was the best of times, it was the worst of times. " * 3
    made = await server.client.post("/v1/states", json={"name": "times", "text": text})
    assert made.status_code == 200, made.text
    before = [tiny_tokenizer.end_of_text_id, *tiny_tokenizer.encode(text)]
    ids = tiny_tokenizer.encode("Once upon")
    fields = {"max_tokens": 12, "n": 3, "repetition_penalty": 1.2}
    whole = await complete(server, prompt=[*before, *ids], **fields)
    started = await complete(server, prompt=ids, state="times@1", **fields)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["text"] for choice in started["choices"]] == texts
    assert started["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    first = await complete(server, prompt=ids, state="times", max_tokens=5, return_state=True, temperature=0)
    rest = await complete(server, prompt=ids, state=first["state"]["data"], max_tokens=8, temperature=0)
    answered = await complete(server, prompt=[*before, *ids], max_tokens=5, logprobs=0, temperature=0)
    by_text = {token_text(tiny_tokenizer, token_id): token_id for token_id in range(tiny_tokenizer.vocab_size)}
    said = [by_text[token] for token in answered["choices"][0]["logprobs"]["tokens"]]
    again = await complete(server, prompt=[*before, *ids, *said, *ids], max_tokens=8, temperature=0)
    assert rest["choices"][0]["text"] == again["choices"][0]["text"]
    assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] == len(before) + len(ids) + 4


async def test_scores_of_a_prompt_are_those_of_generating_it(server: Gateway, tiny_tokenizer: Tokenizer) -> None:
    """Greedy tokens, then the same ids as a prompt: one log-probability for each, whichever way it was reached."""
    fields = {"temperature": 0, "logprobs": 1}
    made = (await complete(server, prompt=[5, 6, 7], max_tokens=12, **fields))["choices"][0]["logprobs"]
    by_text = {token_text(tiny_tokenizer, token_id): token_id for token_id in range(tiny_tokenizer.vocab_size)}
    ids = [5, 6, 7, *(by_text[token] for token in made["tokens"])]
    scored = (await complete(server, prompt=ids, echo=True, max_tokens=0, **fields))["choices"][0]["logprobs"]
    assert scored["token_logprobs"][0] is None
    assert scored["tokens"][3:] == made["tokens"]
    assert scored["token_logprobs"][3:] == pytest.approx(made["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_S6_the_engine_stops_when_the_client_leaves(server: Gateway, is_stream: bool) -> None:
    backend = server.services.backend
    async with connect(server.url) as client:
        await client.post(PATH, {"prompt": "x", "stream": is_stream, "max_tokens": 30_000, "ignore_eos": True})
        await wait_for_running(backend, 1)
        client.leave()
        await wait_for_running(backend, 0)
        assert backend.stats().tokens_generated < 30_000
    assert server.metric("nsm_num_requests_running") == 0


async def wait_for_running(backend: Any, count: int) -> None:
    await until(lambda: backend.stats().num_running == count)


async def test_a_full_queue_is_a_503_that_tells_when_to_come_back(tiny_tokenizer: Tokenizer) -> None:
    backend = local_backend(tiny_tokenizer, max_slots=1, queue_limit=1)
    async with gateway(backend, is_live=True) as server:
        long = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "n": 2}
        async with connect(server.url) as client:
            await client.post(PATH, long)
            await wait_for_running(backend, 1)
            refused = await server.client.post(PATH, json={"prompt": "y"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert error_of(refused)["code"] == "overloaded"
            client.leave()
            await wait_for_running(backend, 0)
        assert (await complete(server, max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_more_choices_than_the_engines_hold_are_refused_for_good(server: Gateway) -> None:
    """By what the engine or the Triton server says, whatever the gateway's own settings are."""
    limit = server.services.backend.max_requests
    assert limit < server.services.settings.queue_limit
    refused = await server.client.post(PATH, json={"prompt": "x", "n": limit + 1})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "n")
    assert str(limit) in error_of(refused)["message"]
    assert len((await complete(server, n=limit, max_tokens=1))["choices"]) == limit


async def test_a_deadline_ends_a_request_and_no_other(server: Gateway) -> None:
    late = server.client.post(PATH, json={"prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "timeout": 0.05})
    answers = await asyncio.gather(late, complete(server, max_tokens=30))
    assert answers[0].status_code == 504
    assert error_of(answers[0])["code"] == "deadline_exceeded"
    assert answers[0].headers["x-should-retry"] == "false"
    assert answers[1]["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"temperature": 0.7, "max_tokens": 40}], ids=str)
async def test_S1_S2_S10_a_session_stream_read_on_anywhere_gives_the_frames_it_would_have_had(
    server: Gateway, fields: dict[str, Any]
) -> None:
    """Random bytes: characters split over tokens; stop strings that match, and that are held back in vain."""
    await server.client.post("/v1/sessions", json={"id": "s"})
    base = {"input": "Once", "seed": 3, "ignore_eos": True, "max_tokens": 60, **fields}
    text = (await server.client.post("/v1/sessions/s/generate", json=base)).json()["choices"][0]["text"]
    for stop in (text[30:33], text[20:21] + "never", text[-2:] + "never"):
        await server.client.delete("/v1/sessions/s")
        await server.client.post("/v1/sessions", json={"id": "s"})
        body = {**base, "stop": stop, "stream": True, "stream_options": {"include_usage": True}}
        whole = (await server.client.post("/v1/sessions/s/generate", json=body)).text
        parts = whole.split("\n\n")[:-2]
        numbers = [int(part.partition("\n")[0].removeprefix("id: ")) for part in parts]
        assert numbers == sorted(set(numbers))
        stream_id = frames_of(whole)[0]["id"]
        for after in [0, *numbers[:: scaled(6, 1)], *numbers[-4:]]:  # the last: what a stop string held back
            rest = (await server.client.get(f"/v1/streams/{stream_id}", params={"starting_after": after})).text
            assert rest.split("\n\n")[:-2] == [part for part, n in zip(parts, numbers, strict=True) if n > after]
