"""A busy server gathers the tokens of a stream into one event: the text stays the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.tokenizer import Tokenizer
from service.backends import local
from service.backends.local import LocalBackend
from tests.support.gateway import Gateway, frames_of, gateway
from tests.support.models import RandomModel, as_loaded

MAX_TOKENS = 60
STEPS_PER_ROUND = 5
PER_TOKEN = {"event_per_token": True}


class PaceOfSteps(StreamPace):
    """As a busy server's, with rounds that end after so many steps of the engine: no clock decides what is gathered."""

    def __init__(self, max_interval_s: float = 0.0) -> None:
        super().__init__(max_interval_s)
        self._num_steps = 0

    def step_ended(self) -> None:
        self._num_steps += 1
        if self._num_steps % STEPS_PER_ROUND == 0:
            super().step_ended()  # without an interval: at once


class EngineInStep(AsyncEngine):
    """Begins a step when the readers have handled the one before: they always wait for the pace, never for the loop."""

    def _turn(self) -> bool:
        goes_on = super()._turn()
        if goes_on and self._loop is not None:
            asyncio.run_coroutine_threadsafe(readers_have_run(), self._loop).result()
        return goes_on


async def readers_have_run() -> None:
    for _ in range(10):  # tasks between an event and its connection; each needs a turn of the loop
        await asyncio.sleep(0)


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    """Tokens wait for their round."""
    monkeypatch.setattr(local, "StreamPace", PaceOfSteps)
    monkeypatch.setattr(local, "AsyncEngine", EngineInStep)
    loaded = as_loaded(RandomModel(tiny_tokenizer.vocab_size), tiny_tokenizer)
    config = EngineConfig(max_slots=4, token_budget=32, queue_limit=32)
    async with gateway(LocalBackend(loaded, config), is_live=True) as opened:
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
    assert len(gathered) <= 1 + MAX_TOKENS // STEPS_PER_ROUND + STEPS_PER_ROUND  # the last round's go on with the end
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
