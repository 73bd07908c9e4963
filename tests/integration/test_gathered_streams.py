"""A busy server gathers the tokens of a stream into one event: the text stays the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine import stream_pace
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from tests.support.gateway import Gateway, frames_of, gateway
from tests.support.models import RandomModel, as_loaded

MAX_TOKENS = 60
PER_TOKEN = {"event_per_token": True}


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    """So busy that tokens always wait for the longest time."""
    monkeypatch.setattr(stream_pace, "SHARE", 1e-9)
    loaded = as_loaded(RandomModel(tiny_tokenizer.vocab_size), tiny_tokenizer)
    config = EngineConfig(max_slots=4, token_budget=32, queue_limit=32)
    async with gateway(LocalBackend(loaded, config, max_interval_s=0.2), is_live=True) as opened:
        yield opened


async def pieces_of(server: Gateway, path: str, **body: Any) -> list[str]:
    """The texts of a stream's events with text."""
    asked = {"seed": 1, "ignore_eos": True, "stream": True, "max_tokens": MAX_TOKENS, **body}
    response = await server.client.post(path, json=asked)
    assert response.status_code == 200, response.text
    choices = [frame["choices"][0] for frame in frames_of(response.text)]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    return [text for text in texts if text]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once"}]}),
    ],
)
async def test_gathered_tokens_are_the_same_text_in_fewer_events(
    server: Gateway, path: str, prompt: dict[str, Any]
) -> None:
    single = await pieces_of(server, path, **prompt, stream_options=PER_TOKEN)
    gathered = await pieces_of(server, path, **prompt)
    assert "".join(gathered) == "".join(single)
    assert len(gathered) < len(single)  # how many fewer depends on how busy the server is
    assert gathered[0] == single[0]  # the first token never waits


async def test_an_event_per_token_and_log_probabilities_stay_exact(server: Gateway) -> None:
    single = await pieces_of(server, "/v1/completions", prompt="Once", stream_options=PER_TOKEN)
    scored = await pieces_of(server, "/v1/completions", prompt="Once", logprobs=0)
    assert single == scored


async def test_several_choices_are_read_by_their_task(server: Gateway) -> None:
    alone = await pieces_of(server, "/v1/completions", prompt="Once", stream_options=PER_TOKEN)
    asked = {"prompt": "Once", "n": 2, "seed": 1, "ignore_eos": True, "stream": True, "max_tokens": MAX_TOKENS}
    frames = frames_of((await server.client.post("/v1/completions", json=asked)).text)
    choices = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == 0]
    assert [choice["text"] for choice in choices if choice["text"]] == alone
