"""A busy server gathers the tokens of a stream into one event: the text stays the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.stream_pace import StreamPace, Write
from nsm_core.tokenizer import Tokenizer
from service.backends import local
from service.backends.local import LocalBackend
from service.turns.turn import ShowTokens, Turn
from tests.support.gateway import Gateway, frames_of, gateway
from tests.support.models import RandomModel, as_loaded

MAX_TOKENS = 60
STEPS_PER_ROUND = 5
LATE = 60.0  # s
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


async def test_a_turns_stream_is_written_directly_with_the_frames_of_its_record(
    server: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def show(turn: Turn, first: int, ids: Sequence[int], texts: Sequence[str]) -> Write | None:
        write = show_directly(turn, first, ids, texts)
        shown.extend(range(first, first + len(ids)) if write is not None else ())
        return write

    show_directly = Turn.show
    monkeypatch.setattr(Turn, "show", show)
    await server.client.post("/v1/sessions", json={"id": "s"})
    asked = {"input": "Once", "seed": 1, "ignore_eos": True, "stream": True, "max_tokens": MAX_TOKENS}
    while not shown:  # a turn whose record begins late, on a busy machine, has all its tokens then
        stream = (await server.client.post("/v1/sessions/s/generate", json=asked)).text
        again = await server.client.get(f"/v1/streams/{frames_of(stream)[0]['id']}")
        assert stream == again.text
    assert shown == sorted(set(shown))


async def test_a_turn_that_was_written_directly_goes_without_a_collection(
    server: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    def show_by(turn: Turn, show: ShowTokens) -> None:
        weakref.finalize(turn, ended.set)
        set_show(turn, show)

    set_show = Turn.show_by
    monkeypatch.setattr(Turn, "show_by", show_by)
    await server.client.post("/v1/sessions", json={"id": "s"})
    gc.collect()
    gc.disable()
    try:
        asked = {"input": "Once", "ignore_eos": True, "stream": True, "max_tokens": MAX_TOKENS}
        await server.client.post("/v1/sessions/s/generate", json=asked)
        await asyncio.wait_for(ended.wait(), LATE)
    finally:
        gc.enable()


async def test_a_turn_with_two_readers_gives_both_all_its_frames(server: Gateway) -> None:
    await server.client.post("/v1/sessions", json={"id": "s"})
    asked = {"input": "Once", "ignore_eos": True, "max_tokens": MAX_TOKENS, "stream": True}
    path, key = "/v1/sessions/s/generate", {"idempotency-key": "k"}
    first, second = await asyncio.gather(*(server.client.post(path, json=asked, headers=key) for _ in range(2)))
    assert first.text == second.text


async def test_several_choices_are_read_by_their_task(server: Gateway) -> None:
    alone = await pieces_of(server, "/v1/completions", prompt="Once", stream_options=PER_TOKEN)
    asked = {"prompt": "Once", "n": 2, "seed": 1, "ignore_eos": True, "stream": True, "max_tokens": MAX_TOKENS}
    frames = frames_of((await server.client.post("/v1/completions", json=asked)).text)
    choices = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == 0]
    assert [choice["text"] for choice in choices if choice["text"]] == alone
