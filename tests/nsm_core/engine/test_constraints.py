"""Requests with grammars: valid answers whatever else runs, the same alone and in batches, with drafts and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from nsm_core.engine.request import FinishReason, GenerationRequest
from nsm_core.errors import GrammarFailed, InvalidRequest
from nsm_core.grammars import compiler
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    ExactExecutor,
    ScriptedModel,
    assert_log_and_state_agree,
    make_engine,
    make_request,
    overlapped,
    run_all,
    run_one,
)
from tests.support.counts import scaled
from tests.support.models import RandomModel
from tests.support.schemas import MAX_TOKENS, SCHEMAS, check_json


def constrained(
    name: str, grammar: Grammar, *, seed: int = 0, temperature: float = 1.0, **changes: object
) -> GenerationRequest:
    sampling = SamplingParams(
        **{"max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed, "grammar": grammar, **changes}  # type: ignore[arg-type]
    )
    return GenerationRequest(request_id=name, prompt_ids=(0, 5, 9), sampling=sampling, keep_state=True)


def schema_grammar(name: str) -> Grammar:
    return json_schema_grammar(SCHEMAS[name], param="schema")


@pytest.fixture(scope="module")
def model(tiny_tokenizer: Tokenizer) -> RandomModel:
    return RandomModel(tiny_tokenizer.vocab_size)


def mixed_requests(count: int) -> list[GenerationRequest]:
    """Every third one is free; the others have one of the schemas, greedy or not."""
    names, requests = list(SCHEMAS), []
    for number in range(count):
        if number % 3 == 0:
            requests.append(make_request(f"free-{number}", (0, number % 50 + 1), temperature=1.0, seed=number))
        else:
            schema = names[number % len(names)]
            temperature = 0.0 if number % 5 == 0 else 1.0
            requests.append(
                constrained(f"{schema}-{number}", schema_grammar(schema), seed=number, temperature=temperature)
            )
    return requests


def test_every_answer_of_mixed_batches_is_valid_and_as_if_it_ran_alone(
    model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    requests = mixed_requests(scaled(reduced=60, full=15_000))  # two of three have a form
    outcomes = run_all(make_engine(model, tiny_tokenizer, max_slots=8, queue_limit=len(requests)), requests)
    for request in requests:
        outcome = outcomes[request.request_id]
        if request.sampling.grammar is None:
            continue
        assert outcome.finished.reason is FinishReason.STOP
        check_json(outcome.text, SCHEMAS[request.request_id.partition("-")[0]])
        assert_log_and_state_agree(model, outcome.end_state)
    for request in requests[:6]:
        alone = run_one(make_engine(model, tiny_tokenizer), request)
        assert alone.ids == outcomes[request.request_id].ids


def test_an_answer_ends_with_its_last_token_and_needs_none_to_say_so(
    model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    outcome = run_one(
        make_engine(model, tiny_tokenizer), constrained("a", Grammar(kind="choice", source='["yes", "no"]'))
    )
    assert outcome.text in ("yes", "no")
    assert tiny_tokenizer.decode(outcome.ids) == outcome.text
    assert (outcome.finished.reason, outcome.finished.stop_reason) == (FinishReason.STOP, None)


def test_end_of_text_comes_only_where_the_grammar_takes_it(tiny_tokenizer: Tokenizer) -> None:
    """The model says end of text for ever; the grammar wants two letters first, and takes more."""
    model = ScriptedModel([], vocab_size=tiny_tokenizer.vocab_size, end_id=tiny_tokenizer.end_of_text_id)
    outcome = run_one(
        make_engine(model, tiny_tokenizer),
        constrained("a", Grammar(kind="regex", source="[a-z]{2,}"), temperature=0.0),
    )
    assert outcome.finished.reason is FinishReason.STOP
    assert len(outcome.text) >= 2
    assert outcome.ids[-1] == tiny_tokenizer.end_of_text_id


def test_min_tokens_come_before_the_end(tiny_tokenizer: Tokenizer) -> None:
    model = ScriptedModel([], vocab_size=tiny_tokenizer.vocab_size, end_id=tiny_tokenizer.end_of_text_id)
    request = make_request(ignore_eos=False, max_tokens=8)
    wanted = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, min_tokens=5))
    outcome = run_one(make_engine(model, tiny_tokenizer), wanted)
    assert len(outcome.ids) == 6
    assert [token_id == tiny_tokenizer.end_of_text_id for token_id in outcome.ids] == [False] * 5 + [True]
    short = constrained("b", Grammar(kind="choice", source='["yes"]'), min_tokens=50, temperature=0.0)
    assert run_one(make_engine(small_model_of(tiny_tokenizer), tiny_tokenizer), short).text == "yes"


def small_model_of(tokenizer: Tokenizer) -> RandomModel:
    return RandomModel(tokenizer.vocab_size)


@pytest.mark.parametrize("name", SCHEMAS)
def test_drafts_give_the_answer_of_single_steps(tiny_tokenizer: Tokenizer, name: str) -> None:
    """The model repeats a valid answer, so that drafts are found, and often wrong where the grammar ends."""
    text = {"answer": '{"title": "ab", "kind": "tale", "year": 1850, "is_long": true, "marks": [1, 1, 1]}'}.get(
        name, '[["a", "b"], ["a", "b"], ["a", "b"]]'
    )
    model = ScriptedModel(tiny_tokenizer.encode(text * 3), vocab_size=tiny_tokenizer.vocab_size, prompt_len=3)
    request = constrained("a", schema_grammar(name), temperature=0.0)
    plain, drafting = (
        run_one(make_engine(model, tiny_tokenizer, executor=ExactExecutor, speculation=speculation), request)
        for speculation in ("off", "lookup")
    )
    assert drafting.ids == plain.ids
    assert drafting.end_state == plain.end_state
    check_json(plain.text, SCHEMAS[name])


def test_an_answer_continues_inside_its_grammar_on_another_engine(
    model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    """At every one of its tokens: what was sampled is given to the other engine, which gives the rest."""
    request = constrained("a", schema_grammar("answer"), seed=3)
    whole = run_one(make_engine(model, tiny_tokenizer), request)
    for num_sampled in range(1, len(whole.ids) + 1, scaled(reduced=4, full=1)):
        taken = dataclasses.replace(request, sampled_ids=tuple(whole.ids[:num_sampled]))
        rest = run_one(make_engine(model, tiny_tokenizer), taken)
        assert rest.ids == whole.ids[num_sampled:]
        assert rest.finished.reason is FinishReason.STOP
        assert rest.end_state.new_ids == whole.end_state.new_ids


def test_tokens_of_another_text_are_refused_as_an_answers_beginning(
    model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    request = constrained("a", schema_grammar("answer"))
    wrong = dataclasses.replace(request, sampled_ids=tuple(tiny_tokenizer.encode("It was the best")))
    with pytest.raises(GrammarFailed):
        run_one(make_engine(model, tiny_tokenizer), wrong)


def test_a_matcher_that_gives_up_ends_its_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    """The limit of work for one token is next to nothing: it fails closed, at the first token."""
    monkeypatch.setitem(compiler.LIMITS, "step_max_items", 1)
    failing = constrained("a", schema_grammar("answer"))
    free = make_request("b", (0, 3), temperature=1.0)
    outcomes = run_all(make_engine(model, tiny_tokenizer), [failing, free])
    assert isinstance(outcomes["a"].finished.error, GrammarFailed)
    assert outcomes["a"].ids == []
    assert outcomes["b"].ids == run_one(make_engine(model, tiny_tokenizer), free).ids


def test_a_token_that_the_grammar_refuses_after_all_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    def refuse(self: TokenMatcher, token_id: int) -> None:
        raise GrammarFailed("refused")

    monkeypatch.setattr(TokenMatcher, "advance", refuse)
    outcome = run_one(make_engine(model, tiny_tokenizer), constrained("a", schema_grammar("answer")))
    assert isinstance(outcome.finished.error, GrammarFailed)
    assert outcome.text == ""


def test_steps_overlap_again_when_the_constrained_request_has_ended(
    model: RandomModel, tiny_tokenizer: Tokenizer
) -> None:
    requests: Sequence[GenerationRequest] = [
        constrained("a", schema_grammar("point")),
        make_request("b", (0, 3), temperature=1.0, max_tokens=64),
    ]
    plain = run_all(make_engine(model, tiny_tokenizer), requests)
    flying = run_all(make_engine(model, tiny_tokenizer, executor=overlapped()), requests)
    assert {name: outcome.events for name, outcome in flying.items()} == {
        name: outcome.events for name, outcome in plain.items()
    }


def test_ignore_eos_is_refused_with_a_grammar() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(grammar=Grammar(kind="regex", source="a", param="guided_regex"), ignore_eos=True)
    assert refusal.value.param == "ignore_eos"
