"""Overlap and the states of requests: at stops, in prompts, at ends, at logits that are not finite."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.engine import overlap
from nsm_core.engine.request import FinishReason, PromptState
from nsm_core.errors import NumericalError
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.chants import CHANT, STOPS
from tests.nsm_core.engine.harness import (
    Outcome,
    ScriptedModel,
    assert_log_and_state_agree,
    make_request,
    random_ids,
    run_all,
    run_one,
)
from tests.nsm_core.engine.overlap_pairs import Pair, RecordingExecutor
from tests.support.counts import scaled


class Said:
    """A model that says a text, and a request for it."""

    def __init__(self, tokenizer: Tokenizer, text: str, *, by_byte: bool) -> None:
        parts = [bytes([byte]) for byte in text.encode()]
        ids = [token_id for part in parts for token_id in tokenizer.encode_bytes(part)]
        self.model = ScriptedModel(ids if by_byte else tokenizer.encode(text), vocab_size=512)

    def compare(self, tokenizer: Tokenizer, **params: Any) -> tuple[Outcome, Pair]:
        """Beside a request that is never held up."""
        pair = Pair(self.model, tokenizer)
        request = make_request(**{"max_tokens": 300, "ignore_eos": False, **params})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap, "MAX_PAUSING_SHARE", 1.0)
            outcome = pair.compare([request, make_request("b", max_tokens=9)])["a"]
        if request.keep_state:
            assert_log_and_state_agree(self.model, outcome.end_state)
        return outcome, pair


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("by_byte", [True, False], ids=["bytes", "tokens"])
def test_S2_R12_state_is_rewound_to_the_start_of_a_stop_string(
    tiny_tokenizer: Tokenizer, stop: tuple[str, ...], by_byte: bool
) -> None:
    Said(tiny_tokenizer, CHANT * 2, by_byte=by_byte).compare(tiny_tokenizer, stop=stop)


@settings(max_examples=scaled(60, full=1500), deadline=None)
@given(st.data(), st.text("ab", min_size=1, max_size=160), st.integers(1, 170), st.booleans())
def test_S2_R12_any_stop_strings_in_any_text(
    tiny_tokenizer: Tokenizer, data: st.DataObject, text: str, max_tokens: int, keep_state: bool
) -> None:
    """Two letters: stop strings begin in vain, long ones are held over more steps than a second copy takes."""
    starts = st.integers(0, len(text) - 1)
    part = st.builds(lambda start, length: text[start : start + length], starts, st.integers(1, 120))
    stop = tuple(data.draw(st.lists(st.one_of(part, part.map(lambda found: found + "a")), max_size=3)))
    said = Said(tiny_tokenizer, text, by_byte=data.draw(st.booleans()))
    said.compare(tiny_tokenizer, stop=stop, max_tokens=max_tokens, keep_state=keep_state)


def test_a_text_that_is_held_back_costs_one_step_and_a_long_one_waits_for_its_second_copy(
    tiny_tokenizer: Tokenizer, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "MAX_PAUSING_SHARE", 1.0)
    said = Said(tiny_tokenizer, "one\ntwo q" + "x" * 90 + "y", by_byte=True)
    pair = Pair(said.model, tiny_tokenizer, RecordingExecutor)
    run_one(pair.overlapped, make_request(stop=("\n\nUser:",), max_tokens=20))
    assert pair.fake.num_skipped == 1
    assert notes.count("wait") == 21
    del notes[:]
    pair.compare([make_request(stop=("q" + "x" * 91,), max_tokens=99)], is_tagged=False)
    assert notes.count("wait") == 99 + 1 - 3  # one step without a token; three were waited for as plain ones are


@pytest.mark.parametrize("budget", [2, 7, 64])
@pytest.mark.parametrize("positions", [(1,), (2, 3), (1, 4, 9), (9,), (3, 10)])
def test_prompt_states_are_those_of_their_positions(
    tiny_tokenizer: Tokenizer, budget: int, positions: tuple[int, ...]
) -> None:
    """The next chunk is launched before they are taken."""
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, max_slots=2, token_budget=budget)
    request = dataclasses.replace(make_request(prompt_ids=random_ids(1, 10), max_tokens=4), keep_states_at=positions)
    outcome = pair.compare([request, make_request("b", random_ids(2, 12))])["a"]
    assert [event.position for event in outcome.events if isinstance(event, PromptState)] == list(positions)


def test_prompt_states_of_an_unawaited_step_are_awaited(tiny_tokenizer: Tokenizer) -> None:
    """Steps do not overlap beside log-probabilities; a step that ends inside a prompt samples nothing."""
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, max_slots=2, token_budget=4)
    request = make_request(prompt_ids=random_ids(1, 10), max_tokens=2, logprobs=0, keep_state=False)
    pair.compare([dataclasses.replace(request, keep_states_at=(3, 8))])
    assert pair.fake.num_side_reads == 0


def test_overlap_begins_after_scored_prompts_and_forced_ids(tiny_tokenizer: Tokenizer, notes: list[str]) -> None:
    model = ScriptedModel(list(range(100, 140)), vocab_size=512, prompt_len=3)
    pair = Pair(model, tiny_tokenizer, RecordingExecutor)
    request = make_request(prompt_ids=(1, 2, 3), max_tokens=12, prompt_logprobs=0)
    outcome = pair.compare([request])["a"]
    assert notes.count("wait") > 8
    del notes[:]
    request = dataclasses.replace(request, prompt_logprobs=None, sampled_ids=tuple(outcome.ids[:4]))
    assert pair.compare([request])["a"].tokens == outcome.tokens[4:]
    assert notes.count("wait") > 5


# --- ends of every kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("position", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("end", ["stop id", "end of text", "both kept", "stop string"])
def test_R12_the_state_is_that_of_the_end(tiny_tokenizer: Tokenizer, max_tokens: int, position: int, end: str) -> None:
    ids = [tiny_tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    if end == "end of text":
        ids[position] = tiny_tokenizer.end_of_text_id
    pair = Pair(ScriptedModel(ids, vocab_size=512), tiny_tokenizer)
    params: dict[str, Any] = {"stop": ("abcdefgh"[position],), "keep_state": False} if end == "stop string" else {}
    if end in ("stop id", "both kept"):
        params["stop_token_ids"] = (ids[position],)
    requests = [make_request("a", max_tokens=max_tokens, ignore_eos=False, **params)]
    if end == "both kept":  # another one goes on beside it, in a row in front of it
        requests.insert(0, make_request("b", max_tokens=8))
    outcome = pair.compare(requests)["a"]
    is_stopped = position < max_tokens
    assert outcome.finished.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    if end != "stop string":
        assert_log_and_state_agree(pair.model, outcome.end_state)


class FailsAt(ScriptedModel):
    """Its logits are not finite from a place on."""

    position = 0

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden[..., :1] >= self.position, torch.nan, super().logits(hidden))


@pytest.mark.parametrize("num_good", range(5))
def test_numbers_that_are_not_finite_end_their_request_alone(tiny_tokenizer: Tokenizer, num_good: int) -> None:
    """The other one has fewer tokens before it than the place where it would fail."""
    model = FailsAt(list(range(100, 140)), vocab_size=512, prompt_len=1)
    model.position = 10 + num_good
    pair = Pair(model, tiny_tokenizer)
    long, short = random_ids(3, 10), make_request("short", max_tokens=6)
    requests = [make_request("long", long, max_tokens=9), short]
    want, got = run_all(pair.plain, requests), run_all(pair.overlapped, requests)
    assert got["short"] == want["short"]
    assert got["short"].finished.reason is FinishReason.LENGTH
    assert got["long"].tokens == want["long"].tokens
    assert len(got["long"].tokens) == num_good
    assert isinstance(got["long"].finished.error, NumericalError)
    assert str(got["long"].finished.error) == str(want["long"].finished.error)
