"""R4: with drafts of tokens every request gives what it gives without, to the bit: events, end and state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.engine.engine import Engine
from nsm_core.engine.request import FinishReason, GenerationRequest, TokenEvent
from nsm_core.engine.speculation import MAX_ROWS, can_draft
from nsm_core.errors import ConfigError
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.model.nsm import NsmModel
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.chants import CHANT, STOPS
from tests.nsm_core.engine.harness import (
    ExactExecutor,
    Outcome,
    ScriptedModel,
    assert_log_and_state_agree,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_all,
    run_one,
)
from tests.support.counts import scaled
from tests.support.models import random_model, small_config
from tests.support.rwkv7 import random_tensors
from tests.support.rwkv7 import small_config as small_rwkv7

needs_native = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")


def engines(
    model: SequenceModel, tokenizer: Tokenizer, executor: ExecutorFactory, **limits: int
) -> tuple[Engine, Engine]:
    """Without and with drafts."""
    plain, drafting = (
        make_engine(model, tokenizer, executor=executor, speculation=speculation, **limits)
        for speculation in ("off", "lookup")
    )
    return plain, drafting


RWKV7 = "rwkv7"  # in place of a pattern of layers


@functools.cache
def looping_model(pattern: str) -> NsmModel | Rwkv7Model:
    """Random weights, whose greedy texts run into loops sooner or later."""
    if pattern == RWKV7:
        config = small_rwkv7(vocab_size=512)
        tensors = random_tensors(config)
        return Rwkv7Model(config, tensors | {"emb.weight": 0.3 * tensors["emb.weight"]})
    model = random_model(small_config(512, layer_pattern=pattern, window=20))
    model.embedding.weight.mul_(0.3)
    return model.eval()


@functools.cache
def native(pattern: str) -> ExecutorFactory:
    model = looping_model(pattern)
    if isinstance(model, Rwkv7Model):
        return functools.partial(Rwkv7Executor, weights=Rwkv7Weights(model, Precision.INT8))
    return functools.partial(NativeExecutor, weights=NativeWeights(model))


def repetitive_ids(seed: int, length: int, period: int) -> tuple[int, ...]:
    ids = random_ids(seed, period)
    return tuple(ids[index % period] for index in range(length))


# --- random models, random mixtures of requests -------------------------------------------------------------------

params = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40)},
    optional={
        "temperature": st.sampled_from([0.0, 0.0, 0.7]),
        "logprobs": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.just({7: 2.0, 300: -50.0}),
        "stop_token_ids": st.lists(st.integers(0, 511), max_size=20).map(tuple),
        "ignore_eos": st.booleans(),
        "keep_state": st.booleans(),
    },
)
prompts = st.builds(repetitive_ids, st.integers(0, 30), st.integers(1, 60), st.integers(1, 25))


@needs_native
@settings(max_examples=scaled(15, full=200), deadline=None)
@given(
    st.sampled_from(["N", "NW", "KW", RWKV7]),
    st.lists(st.tuples(prompts, params), min_size=1, max_size=7),
    st.lists(st.integers(0, 30), max_size=7),
    st.integers(6, 64),
)
def test_R4_R9_rows_that_join_and_leave_equal_runs_without_drafts(
    tiny_tokenizer: Tokenizer,
    pattern: str,
    cases: Sequence[tuple[tuple[int, ...], dict[str, Any]]],
    arrivals: Sequence[int],
    token_budget: int,
) -> None:
    requests = [make_request(str(index), ids, **params) for index, (ids, params) in enumerate(cases)]
    plain, drafting = engines(
        looping_model(pattern), tiny_tokenizer, native(pattern), max_slots=6, token_budget=token_budget
    )
    want = run_all(plain, requests, arrivals=arrivals[: len(requests)])
    assert run_all(drafting, requests, arrivals=arrivals[: len(requests)]) == want
    assert plain.stats().num_drafts == 0
    follow_up(want, plain, drafting)


def follow_up(ends: dict[str, Outcome], plain: Engine, drafting: Engine) -> None:
    """A second turn on every kept state."""
    requests = []
    for name, outcome in ends.items():
        if outcome.finished.end_state is not None:
            resume, pending = resume_from(outcome.end_state)
            requests.append(make_request(name, (*pending, 5, 6), resume=resume, max_tokens=20))
    assert run_all(drafting, requests) == run_all(plain, requests)


@needs_native
def test_drafts_are_accepted_and_refused_in_these_texts(tiny_tokenizer: Tokenizer) -> None:
    """What the tests above compare would be nothing otherwise."""
    _, drafting = engines(looping_model("NW"), tiny_tokenizer, native("NW"))
    run_all(drafting, [make_request(str(seed), repetitive_ids(seed, 40, 11), max_tokens=60) for seed in range(8)])
    stats = drafting.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens < stats.tokens_generated == 8 * 60
    assert stats.num_steps < 8 * 60


# --- scripts: every border of a draft ------------------------------------------------------------------------------


def script_of(tokenizer: Tokenizer, text: str, *, by_byte: bool) -> list[int]:
    if not by_byte:
        return tokenizer.encode(text)
    return [token_id for byte in text.encode() for token_id in tokenizer.encode_bytes(bytes([byte]))]


class Chant:
    """A model that says the text over and over, after a prompt that holds some of it."""

    def __init__(self, tokenizer: Tokenizer, *, by_byte: bool = True, text: str = CHANT, times: int = 2) -> None:
        self.ids = script_of(tokenizer, text, by_byte=by_byte)
        self.prompt_ids = (0, *self.ids)
        self.model = ScriptedModel(self.ids * times, vocab_size=512, prompt_len=len(self.prompt_ids))

    def request(self, **params: Any) -> GenerationRequest:
        return make_request(prompt_ids=self.prompt_ids, **{"max_tokens": 60, "ignore_eos": False, **params})

    def run(self, tokenizer: Tokenizer, request: GenerationRequest) -> tuple[Outcome, Engine]:
        """With drafts; compared with what the request gives without."""
        plain, drafting = engines(self.model, tokenizer, ExactExecutor)
        got = run_one(drafting, request)
        assert got == run_one(plain, request)
        return got, drafting


@pytest.mark.parametrize("by_byte", [True, False], ids=["bytes", "tokens"])
@pytest.mark.parametrize("max_tokens", [*range(1, 24), 60])
def test_R12_max_tokens_ends_a_text_inside_a_draft(tiny_tokenizer: Tokenizer, by_byte: bool, max_tokens: int) -> None:
    chant = Chant(tiny_tokenizer, by_byte=by_byte)
    got, engine = chant.run(tiny_tokenizer, chant.request(max_tokens=max_tokens))
    assert len(got.ids) == max_tokens
    assert_log_and_state_agree(chant.model, got.end_state)
    assert engine.stats().tokens_generated == max_tokens


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("by_byte", [True, False], ids=["bytes", "tokens"])
@pytest.mark.parametrize("keep_state", [True, False], ids=["kept", "forgotten"])
def test_S2_R12_stop_strings_across_the_borders_of_drafts(
    tiny_tokenizer: Tokenizer, stop: tuple[str, ...], by_byte: bool, keep_state: bool
) -> None:
    chant = Chant(tiny_tokenizer, by_byte=by_byte)
    got, _ = chant.run(tiny_tokenizer, chant.request(stop=stop, keep_state=keep_state, max_tokens=150))
    if keep_state:
        assert_log_and_state_agree(chant.model, got.end_state)


verses = st.text("ab", min_size=4, max_size=90)


@settings(max_examples=scaled(50, full=1000), deadline=None)
@given(st.data(), verses, verses, st.integers(1, 120))
def test_S2_R12_any_stop_strings_in_any_text(
    tiny_tokenizer: Tokenizer, data: st.DataObject, said: str, more: str, max_tokens: int
) -> None:
    """Two letters: drafts come true for a while, stop strings begin in vain, long ones are held over many steps."""
    text = data.draw(st.sampled_from([said + more, said * 3, said * 2 + more * 2]))
    starts = st.integers(0, len(text) - 1)
    part = st.builds(lambda start, length: text[start : start + length], starts, st.integers(1, 80))
    stop = tuple(data.draw(st.lists(st.one_of(part, part.map(lambda found: found + "a"), verses), max_size=3)))
    prompt_ids = (0, *script_of(tiny_tokenizer, said, by_byte=True))
    model = ScriptedModel(script_of(tiny_tokenizer, text, by_byte=True), vocab_size=512, prompt_len=len(prompt_ids))
    request = make_request(prompt_ids=prompt_ids, max_tokens=max_tokens, stop=stop, ignore_eos=False)
    plain, drafting = engines(model, tiny_tokenizer, ExactExecutor)
    whole = run_one(plain, request)
    assert run_one(drafting, request) == whole
    assert_log_and_state_agree(model, whole.end_state)
    again = dataclasses.replace(request, sampled_ids=tuple(whole.ids[: data.draw(st.integers(0, len(whole.ids)))]))
    assert run_one(drafting, again) == run_one(plain, again)


@pytest.mark.parametrize("position", range(1, 30))
def test_R12_a_stop_id_inside_an_accepted_draft(tiny_tokenizer: Tokenizer, position: int) -> None:
    """The prompt holds it, so it is drafted; what was read past it is not part of the state."""
    ids = list(range(100, 100 + 40))
    prompt_ids = (0, *ids)
    model = ScriptedModel(ids, vocab_size=512, prompt_len=len(prompt_ids))
    plain, drafting = engines(model, tiny_tokenizer, ExactExecutor)
    request = make_request(prompt_ids=prompt_ids, max_tokens=40, stop_token_ids=(ids[position],))
    got = run_one(drafting, request)
    assert got == run_one(plain, request)
    assert got.finished.reason is FinishReason.STOP
    assert got.end_state.new_ids == (*prompt_ids, *ids[:position])
    assert_log_and_state_agree(model, got.end_state)


def test_an_end_of_text_inside_an_accepted_draft(tiny_tokenizer: Tokenizer) -> None:
    end_id = tiny_tokenizer.end_of_text_id
    ids = [*range(100, 111), end_id, *range(111, 120)]
    model = ScriptedModel(ids, vocab_size=512, prompt_len=1 + len(ids))
    plain, drafting = engines(model, tiny_tokenizer, ExactExecutor)
    request = make_request(prompt_ids=(0, *ids), max_tokens=40, ignore_eos=False)
    got = run_one(drafting, request)
    assert got == run_one(plain, request)
    assert got.end_state.new_ids == (0, *ids, *ids[:11])
    assert drafting.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_S8_cancelled_request_has_shown_a_part_of_its_text_and_frees_its_slot(
    tiny_tokenizer: Tokenizer, num_steps: int
) -> None:
    chant = Chant(tiny_tokenizer)
    plain, drafting = engines(chant.model, tiny_tokenizer, ExactExecutor, max_slots=1)
    request = chant.request(stop=("never said",))
    whole = run_one(plain, request)
    drafting.add(request)
    events = [event for _ in range(num_steps) for _, event in drafting.step()]
    drafting.cancel(request.request_id)
    (_, finished), *_ = drafting.step()
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert tokens == whole.tokens[: len(tokens)]
    assert finished.reason is FinishReason.ABORT
    assert finished.end_state is None
    assert finished.completion_tokens == len(tokens)
    assert run_one(drafting, request) == whole  # in the same row


@pytest.mark.parametrize("count", range(0, 60, 7))
def test_S10_stream_continued_on_another_engine_is_identical(tiny_tokenizer: Tokenizer, count: int) -> None:
    chant = Chant(tiny_tokenizer)
    request = chant.request(stop=("the best of times, the worse",))
    whole, _ = chant.run(tiny_tokenizer, request)
    again = dataclasses.replace(request, sampled_ids=tuple(whole.ids[:count]))
    got, _ = chant.run(tiny_tokenizer, again)
    assert got.tokens == whole.tokens[count:]
    assert got.end_state.new_ids == whole.end_state.new_ids


class FailsAt(ScriptedModel):
    """Its logits are not finite from a place on."""

    position = 0

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden[..., :1] >= self.position, torch.nan, super().logits(hidden))


@pytest.mark.parametrize("num_good", range(1, 20))
def test_numbers_that_are_not_finite_end_a_request_where_they_would_without_drafts(
    tiny_tokenizer: Tokenizer, num_good: int
) -> None:
    ids = list(range(100, 140))
    model = FailsAt(ids, vocab_size=512, prompt_len=41)
    model.position = 41 + num_good
    plain, drafting = engines(model, tiny_tokenizer, ExactExecutor)
    request = make_request(prompt_ids=(0, *ids), max_tokens=30)
    want, got = run_one(plain, request), run_one(drafting, request)
    assert got.tokens == want.tokens
    assert len(got.tokens) == num_good
    assert str(got.finished.error) == str(want.finished.error)


# --- who is drafted for, and what is counted -----------------------------------------------------------------------


def test_only_greedy_requests_without_penalties_are_drafted_for() -> None:
    assert can_draft(make_request(logit_bias={3: 1.0}, logprobs=2, stop=("x",)))
    assert not can_draft(make_request(temperature=0.1))
    assert not can_draft(make_request(repetition_penalty=1.1))
    assert not can_draft(dataclasses.replace(make_request(), include_routing=True))


def test_R18_executor_without_savepoints_drafts_no_tokens_and_logs_it(
    tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="nsm.engine")
    chant = Chant(tiny_tokenizer)
    engines(chant.model, tiny_tokenizer, ExactExecutor)
    make_engine(chant.model, tiny_tokenizer, speculation="off")
    assert "drafted" not in caplog.text
    engine = make_engine(chant.model, tiny_tokenizer, executor=EagerExecutor)
    assert "no tokens are drafted" in caplog.text
    run_one(engine, chant.request())
    assert engine.stats().num_drafts == 0


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1])
def test_full_batch_has_no_drafts(tiny_tokenizer: Tokenizer, num_rows: int) -> None:
    chant = Chant(tiny_tokenizer)
    engine = make_engine(chant.model, tiny_tokenizer, executor=ExactExecutor, max_slots=8, token_budget=512)
    run_all(engine, [dataclasses.replace(chant.request(), request_id=str(index)) for index in range(num_rows)])
    assert (engine.stats().num_drafts > 0) == (num_rows <= MAX_ROWS)


def test_counters_add_up(tiny_tokenizer: Tokenizer) -> None:
    """A text that is wholly foreseen: every step but the prompt's gives what it drafted, and one token more."""
    ids = list(range(100, 140))
    model = ScriptedModel(ids, vocab_size=512, prompt_len=41)
    _, engine = engines(model, tiny_tokenizer, ExactExecutor)
    run_one(engine, make_request(prompt_ids=(0, *ids), max_tokens=40))
    stats = engine.stats()
    assert stats.tokens_generated == 40
    assert stats.num_draft_tokens == stats.num_accepted_tokens
    assert stats.step_tokens == 41 + 39  # the last token is never read
    assert stats.num_steps == 40 - stats.num_accepted_tokens
    assert stats.num_accepted_tokens > 25


def test_an_unknown_way_to_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation must be one of off, lookup, got 'ngram'"):
        make_engine(None, None, speculation="ngram")  # type: ignore[arg-type]
