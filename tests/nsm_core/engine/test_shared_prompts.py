"""Requests that share a prompt: it is read once, and each of them gives what it gives alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from nsm_core.engine.engine import Engine
from nsm_core.engine.request import FinishReason, GenerationRequest, PromptState, SharedPrompt
from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import json_schema_grammar
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_all,
    run_one,
    small_model,
)
from tests.support.schemas import MAX_TOKENS, SCHEMAS, check_json

pytestmark = pytest.mark.usefixtures("waiting_or_overlapped")

IDS = random_ids(1, 90)


def choices(number: int, base: GenerationRequest) -> list[GenerationRequest]:
    """`number` choices of one prompt."""
    shared = SharedPrompt(base.request_id, number)
    return [
        dataclasses.replace(
            base,
            request_id=f"{base.request_id}-{index}",
            sampling=dataclasses.replace(base.sampling, choice_index=index),
            shared_prompt=shared,
        )
        for index in range(number)
    ]


def alone(request: GenerationRequest, tokenizer: Tokenizer) -> Outcome:
    return run_one(make_engine(small_model(), tokenizer), dataclasses.replace(request, shared_prompt=None))


def assert_as_alone(outcomes: dict[str, Outcome], requests: Sequence[GenerationRequest], tokenizer: Tokenizer) -> None:
    for request in requests:
        want, got = alone(request, tokenizer), outcomes[request.request_id]
        assert (got.ids, got.text) == (want.ids, want.text)
        assert [type(event) for event in got.events] == [type(event) for event in want.events]
        counts = ("reason", "stop_reason", "prompt_tokens", "cached_tokens", "completion_tokens")
        for name in counts:
            assert getattr(got.finished, name) == getattr(want.finished, name)


@pytest.mark.parametrize("token_budget", [16, 512])
@pytest.mark.parametrize("number", [2, 9])
def test_a_shared_prompt_is_read_once_and_changes_nothing(
    number: int, token_budget: int, tiny_tokenizer: Tokenizer
) -> None:
    requests = choices(number, make_request("a", IDS, temperature=1.0, seed=3))
    engine = make_engine(small_model(), tiny_tokenizer, token_budget=token_budget)
    outcomes = run_all(engine, requests)
    assert_as_alone(outcomes, requests, tiny_tokenizer)
    assert len({tuple(outcome.ids) for outcome in outcomes.values()}) == number
    assert engine.stats().tokens_computed == len(IDS) + number - 1


def test_a_resumed_prompt_is_shared_with_its_state(tiny_tokenizer: Tokenizer) -> None:
    end = run_one(make_engine(small_model(), tiny_tokenizer), make_request("first", IDS)).end_state
    resume, pending = resume_from(end)
    requests = choices(3, make_request("a", (*pending, *IDS[:40]), resume=resume, temperature=1.0, keep_state=False))
    engine = make_engine(small_model(), tiny_tokenizer)
    assert_as_alone(run_all(engine, requests), requests, tiny_tokenizer)
    assert engine.stats().tokens_computed == len(pending) + 40 + 2


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ("a", "xyz"), "max_tokens": 16},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"prompt_logprobs": 1},
        {"ignore_eos": False, "max_tokens": 20},
    ],
    ids=["stop strings", "penalties", "scored", "end of text"],
)
def test_choices_with_other_fields_are_as_alone(changes: dict[str, object], tiny_tokenizer: Tokenizer) -> None:
    requests = choices(3, make_request("a", IDS, temperature=1.0, **changes))  # type: ignore[arg-type]
    engine = make_engine(small_model(), tiny_tokenizer)
    outcomes = run_all(engine, requests)
    assert_as_alone(outcomes, requests, tiny_tokenizer)
    assert engine.stats().tokens_computed == len(IDS) + 2
    if "prompt_logprobs" in changes:
        first, *others = (outcome.scored.logprobs for outcome in outcomes.values())
        assert len(first) == len(IDS)
        for other in others:
            assert [score and score.token_id for score in other] == [score and score.token_id for score in first]


def test_each_choice_follows_the_grammar_by_itself(tiny_tokenizer: Tokenizer) -> None:
    base = make_request("a", IDS, temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=False)
    grammar = json_schema_grammar(SCHEMAS["point"], param="s")
    base = dataclasses.replace(base, sampling=dataclasses.replace(base.sampling, grammar=grammar))
    requests = choices(3, base)
    outcomes = run_all(make_engine(small_model(), tiny_tokenizer), requests)
    assert_as_alone(outcomes, requests, tiny_tokenizer)
    for outcome in outcomes.values():
        check_json(outcome.text, SCHEMAS["point"])


def test_states_kept_within_the_prompt_are_those_of_the_reader(tiny_tokenizer: Tokenizer) -> None:
    first, *others = choices(3, make_request("a", IDS))
    requests = [dataclasses.replace(first, keep_states_at=(20, 90)), *others]
    engine = make_engine(small_model(), tiny_tokenizer)
    outcomes = run_all(engine, requests)
    states = [event.position for event in outcomes["a-0"].events if isinstance(event, PromptState)]
    assert states == [20, 90]
    assert engine.stats().tokens_computed == len(IDS) + 2


def test_a_request_that_wants_states_of_the_read_part_reads_it(tiny_tokenizer: Tokenizer) -> None:
    first, second = choices(2, make_request("a", IDS))
    engine = make_engine(small_model(), tiny_tokenizer)
    outcomes = run_all(engine, [first, dataclasses.replace(second, keep_states_at=(20,))])
    assert [event.position for event in outcomes["a-1"].events if isinstance(event, PromptState)] == [20]
    assert engine.stats().tokens_computed == 2 * len(IDS)


def test_another_prompt_under_the_same_name_is_read_by_itself(tiny_tokenizer: Tokenizer) -> None:
    first, second = choices(2, make_request("a", IDS, temperature=1.0))
    requests = [first, dataclasses.replace(second, prompt_ids=random_ids(2, 90))]
    assert_as_alone(run_all(make_engine(small_model(), tiny_tokenizer), requests), requests, tiny_tokenizer)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_when_the_reader_is_cancelled_the_next_one_reads(num_steps: int, tiny_tokenizer: Tokenizer) -> None:
    requests = choices(4, make_request("a", IDS, temperature=1.0))
    engine = make_engine(small_model(), tiny_tokenizer, token_budget=32)
    outcomes = {request.request_id: Outcome() for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        if steps == num_steps:
            engine.cancel("a-0")
        for request_id, event in engine.step():
            outcomes[request_id].events.append(event)
        steps += 1
    assert_as_alone(outcomes, requests[1:], tiny_tokenizer)
    assert outcomes["a-0"].finished.reason is FinishReason.ABORT


def test_choices_that_come_late_start_from_the_copy_while_one_of_the_others_runs(tiny_tokenizer: Tokenizer) -> None:
    requests = choices(3, make_request("a", IDS, temperature=1.0, max_tokens=12))
    engine = make_engine(small_model(), tiny_tokenizer)
    outcomes = run_all(engine, requests, arrivals=[0, 4, 8])
    assert_as_alone(outcomes, requests, tiny_tokenizer)
    assert engine.stats().tokens_computed == len(IDS) + 2
    again = run_all(engine, requests, arrivals=[0, 1000, 2000])  # each after the one before has ended
    assert_as_alone(again, requests, tiny_tokenizer)


def test_after_the_last_choice_no_copy_is_kept(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    for number in (2, 5):
        run_all(engine, choices(number, make_request("a", IDS)))
    run_all(engine, choices(6, make_request("b", IDS))[:4])  # two never come
    assert num_held(engine) == 0


def test_a_failed_step_ends_its_reader_and_the_others_read_anew(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = choices(3, make_request("a", IDS, temperature=1.0))
    engine = make_engine(small_model(), tiny_tokenizer)
    outcomes = {request.request_id: Outcome() for request in requests}
    for request in requests:
        engine.add(request)
    copy, is_broken = engine._shared._copy, True

    def failing_copy(slot: int) -> object:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise RuntimeError("no memory for a copy")
        return copy(slot)

    monkeypatch.setattr(engine._shared, "_copy", failing_copy)
    while engine.has_work:
        for request_id, event in engine.step():
            outcomes[request_id].events.append(event)
    assert outcomes["a-0"].finished.reason is FinishReason.ERROR
    assert_as_alone(outcomes, requests[1:], tiny_tokenizer)
    assert num_held(engine) == 0


def test_a_prompt_of_one_token_is_not_shared(tiny_tokenizer: Tokenizer) -> None:
    requests = choices(3, make_request("a", (5,), temperature=1.0))
    engine = make_engine(small_model(), tiny_tokenizer)
    assert_as_alone(run_all(engine, requests), requests, tiny_tokenizer)
    assert num_held(engine) == 0


@pytest.mark.parametrize(("name", "number"), [("", 2), ("a", 1), ("a", 0)])
def test_a_shared_prompt_needs_a_name_and_two_requests(name: str, number: int) -> None:
    with pytest.raises(InvalidRequest, match="shared_prompt"):
        SharedPrompt(name, number)


def num_held(engine: Engine) -> int:
    return len(engine._shared._by_name)
