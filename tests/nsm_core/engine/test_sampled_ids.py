"""A request that goes on after tokens that were sampled elsewhere: as if it had never been interrupted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nsm_core.engine.request import GenerationRequest
from nsm_core.errors import InvalidRequest
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    TOLERANCE,
    Outcome,
    RandomModel,
    ScriptedModel,
    assert_log_and_state_agree,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_one,
    small_model,
)
from tests.support.counts import scaled

pytestmark = pytest.mark.usefixtures("waiting_or_overlapped")

PROMPT_IDS = (0, 9, 4)


def after(request: GenerationRequest, whole: Outcome, count: int) -> GenerationRequest:
    return dataclasses.replace(request, sampled_ids=tuple(whole.ids[:count]))


def assert_goes_on(got: Outcome, whole: Outcome, count: int) -> None:
    """Tokens, text and end are those of the unbroken run; nothing comes twice."""
    assert got.tokens == whole.tokens[count:]
    ends = [dataclasses.replace(outcome.finished, end_state=None) for outcome in (got, whole)]
    assert ends[0] == ends[1]
    summaries = [(one.end_state.new_ids, one.end_state.pending, one.end_state.position) for one in (got, whole)]
    assert summaries[0] == summaries[1]
    assert got.end_state.generated_counts == whole.end_state.generated_counts


def scripted(tokenizer: Tokenizer, text: str, *, by_byte: bool) -> ScriptedModel:
    ids = tokenizer.encode(text)
    if by_byte:
        ids = [token_id for byte in text.encode() for token_id in tokenizer.encode_bytes(bytes([byte]))]
    return ScriptedModel(ids, vocab_size=512, prompt_len=len(PROMPT_IDS))


@pytest.mark.parametrize("by_byte", [True, False], ids=["bytes", "tokens"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop": ("worst",)},
        {"stop": ("best of Times", "of time")},
        {"stop": ("never said",)},
        {"stop": ("€x", "é")},
        {"max_tokens": 9},
        {"max_tokens": 9, "stop": ("the best of times, it was",)},
    ],
    ids=lambda settings: repr(settings),
)
def test_S1_S2_text_may_break_at_every_token(
    tiny_tokenizer: Tokenizer, settings: dict[str, Any], by_byte: bool
) -> None:
    model = scripted(tiny_tokenizer, "It was the best of times, €é it was the worst", by_byte=by_byte)
    request = make_request(prompt_ids=PROMPT_IDS, ignore_eos=False, **{"max_tokens": 200, **settings})
    whole = run_one(make_engine(model, tiny_tokenizer), request)
    for count in (*range(0, len(whole.ids), scaled(3, 1)), len(whole.ids)):
        got = run_one(make_engine(model, tiny_tokenizer, token_budget=8), after(request, whole, count))
        assert_goes_on(got, whole, count)
        assert got.end_state.state == whole.end_state.state
        assert_log_and_state_agree(model, got.end_state)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_sampled_ids_continue_draws_and_penalties(tiny_tokenizer: Tokenizer, temperature: float) -> None:
    model: RandomModel = small_model()
    first = run_one(make_engine(model, tiny_tokenizer), make_request(prompt_ids=random_ids(1, 20)))
    resume, pending = resume_from(first.end_state)
    fields = {"temperature": temperature, "seed": 5, "repetition_penalty": 1.3, "max_tokens": 24, "logprobs": 2}
    request = make_request(prompt_ids=(*pending, 7, 8), resume=resume, **fields)
    whole = run_one(make_engine(model, tiny_tokenizer), request)
    for count in range(0, len(whole.ids) + 1, 3):
        got = run_one(make_engine(model, tiny_tokenizer), after(request, whole, count))
        assert got.ids == whole.ids[count:]
        for one, other in zip(got.tokens, whole.tokens[count:], strict=True):
            assert one.text == other.text
            assert one.logprob is not None
            assert other.logprob is not None
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=TOLERANCE)
        assert_log_and_state_agree(model, got.end_state, first.end_state.new_ids[: first.end_state.position])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"sampled_ids": (1,) * 9}, "sampled_ids"),
        ({"sampled_ids": (512,)}, "sampled_ids"),
        ({"sampled_ids": (1,), "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_impossible_sampled_ids_are_refused(tiny_tokenizer: Tokenizer, changes: dict[str, Any], param: str) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    with pytest.raises(InvalidRequest) as caught:
        engine.add(dataclasses.replace(make_request(), **changes))
    assert caught.value.param == param
