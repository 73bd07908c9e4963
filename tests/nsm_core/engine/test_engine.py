"""One request's output and state are those of its solo run, whatever runs beside or before it."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, PromptScored, TokenEvent
from nsm_core.errors import DeadlineExceeded, InvalidRequest, NumericalError, Overloaded
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    RandomModel,
    ScriptedModel,
    assert_log_and_state_agree,
    make_engine,
    make_request,
    random_ids,
    replay,
    resume_from,
    run_all,
    run_one,
    small_model,
)
from tests.support.counts import scaled

# Greedy choices closer than this may differ by rounding; the prompts below have none.
CLEAR_MARGIN = 1e-3


@torch.inference_mode()
def reference_ids(prompt_ids: tuple[int, ...], num: int) -> list[int]:
    """Greedy generation without the engine: one forward, then single steps."""
    model = small_model()
    hidden, state = model.forward(torch.tensor([prompt_ids]), model.initial_state(1))
    ids, last = [], hidden[:, -1]
    for _ in range(num):
        ids.append(int(model.logits(last).argmax()))
        last, state = model.step(torch.tensor(ids[-1:]), state)
    return ids


def case(index: int) -> GenerationRequest:
    """Prompts of 1 to 150 tokens, 1 to 12 tokens to generate."""
    lengths = (1, 2, 3, 17, 40, 63, 64, 65, 100, 150)
    return make_request(str(index), random_ids(index, lengths[index % 10]), max_tokens=1 + index % 12, logprobs=2)


@functools.cache
def _solo(index: int, tokenizer: Tokenizer) -> Outcome:
    return run_one(make_engine(small_model(), tokenizer, token_budget=256), case(index))


@functools.cache
def clear_cases(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those of the first cases in which every greedy choice is clear."""
    return tuple(index for index in range(60) if _is_clear(_solo(index, tokenizer)))


def _is_clear(outcome: Outcome) -> bool:
    tops = [token.logprob.top for token in outcome.tokens if token.logprob is not None]
    return all(first[1] - second[1] > CLEAR_MARGIN for first, second in tops)


def assert_as_alone(outcome: Outcome, index: int, tokenizer: Tokenizer) -> None:
    solo = _solo(index, tokenizer)
    assert outcome.ids == solo.ids
    assert outcome.text == solo.text
    assert outcome.end_state.new_ids == solo.end_state.new_ids
    assert_log_and_state_agree(small_model(), outcome.end_state)


def test_R8_greedy_ids_are_those_of_the_bare_model(tiny_tokenizer: Tokenizer) -> None:
    prompt_ids = random_ids(3, 20)
    outcome = run_one(make_engine(small_model(), tiny_tokenizer), make_request(prompt_ids=prompt_ids, max_tokens=24))
    assert outcome.ids == reference_ids(prompt_ids, 24)
    assert outcome.text == tiny_tokenizer.decode(outcome.ids)
    assert [token.index for token in outcome.tokens] == list(range(1, 25))
    finished = outcome.finished
    assert finished.reason is FinishReason.LENGTH
    assert (finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens) == (20, 0, 24)
    assert finished.num_dropped_tokens == 0


def test_the_fixed_suite_is_large_enough(tiny_tokenizer: Tokenizer) -> None:
    assert len(clear_cases(tiny_tokenizer)) >= 50


@pytest.mark.parametrize("token_budget", [1, 2, 7, 64, 65, 100])
@pytest.mark.parametrize("index", [5, 8, 9])
def test_R7_any_split_of_a_prompt_gives_the_same_ids_and_state(
    token_budget: int, index: int, tiny_tokenizer: Tokenizer
) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=1, token_budget=token_budget)
    assert_as_alone(run_one(engine, case(index)), index, tiny_tokenizer)


@settings(max_examples=scaled(25, 400))
@given(data=st.data(), max_slots=st.integers(1, 6), spare=st.sampled_from([0, 3, 20, 64, 250]))
def test_R9_R15_request_in_a_random_batch_equals_its_solo_run(
    data: st.DataObject, max_slots: int, spare: int, tiny_tokenizer: Tokenizer
) -> None:
    cases = clear_cases(tiny_tokenizer)
    chosen = data.draw(st.lists(st.sampled_from(cases), min_size=1, max_size=10, unique=True))
    arrivals = [data.draw(st.integers(0, 12)) for _ in chosen]
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=max_slots, token_budget=max_slots + spare)
    behind = data.draw(st.sets(st.sampled_from(chosen)))
    requests = [dataclasses.replace(case(index), is_background=index in behind) for index in chosen]
    results = run_all(engine, requests, arrivals=arrivals)
    for index in chosen:
        assert_as_alone(results[str(index)], index, tiny_tokenizer)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.usefixtures("waiting_or_overlapped")
@pytest.mark.parametrize("num_sessions", [scaled(12, 100)])
def test_R15_sessions_interleaved_over_turns_equal_their_solo_transcripts(
    num_sessions: int, tiny_tokenizer: Tokenizer
) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=5, token_budget=40, queue_limit=200)
    logs: dict[str, tuple[int, ...]] = {str(number): () for number in range(num_sessions)}
    requests = {name: make_request(name, random_ids(int(name), 1 + int(name) % 30), max_tokens=4) for name in logs}
    for turn in range(3):
        results = run_all(engine, list(requests.values()), arrivals=[number % 7 for number in range(num_sessions)])
        for name, outcome in results.items():
            new_ids = outcome.end_state.new_ids
            logs[name] += new_ids if turn == 0 or requests[name].prompt_ids[0] != logs[name][-1] else new_ids[1:]
            resume, pending = resume_from(outcome.end_state)
            follow_up = random_ids(1000 * turn + int(name), int(name) % 4)
            requests[name] = make_request(name, pending + follow_up, resume=resume, max_tokens=4)
            assert_same_transcript(logs[name], outcome)


def assert_same_transcript(log: tuple[int, ...], outcome: Outcome) -> None:
    """The ids sampled last are what the bare model says after the rest of the log, and the state is that of the log."""
    num = len(outcome.ids)
    assert list(log[-num:]) == outcome.ids == reference_ids(log[:-num], num)
    state = small_model().state_spec.unpack(outcome.end_state.state)
    torch.testing.assert_close(state, replay(small_model(), log[:-1]), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("num_new", [0, 1, 5])
def test_R10_R11_a_resumed_turn_equals_the_unbroken_run(num_new: int, tiny_tokenizer: Tokenizer) -> None:
    """With no new token the prompt is the pending one alone, with one new token it has two."""
    engine = make_engine(small_model(), tiny_tokenizer)
    first = run_one(engine, make_request(prompt_ids=random_ids(7, 30), max_tokens=6)).end_state
    resume, pending = resume_from(first)
    new_ids = random_ids(8, num_new)
    request = make_request(prompt_ids=pending + new_ids, resume=resume, max_tokens=9)
    outcome = run_one(engine, request)
    assert outcome.ids == reference_ids(first.new_ids + new_ids, 9)
    assert outcome.finished.cached_tokens == first.position == 35
    assert outcome.finished.prompt_tokens == 36 + num_new
    assert_log_and_state_agree(small_model(), outcome.end_state, log_before=first.new_ids[:-1])
    again = run_one(engine, request)  # the turn is replayed from the same stored state: nothing was consumed
    assert again.events == outcome.events


def test_R1_a_follow_up_computes_its_new_tokens_only(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    first = run_one(engine, make_request(prompt_ids=random_ids(1, 200), max_tokens=3)).end_state
    before = engine.stats()
    assert (before.tokens_computed, before.tokens_resumed, before.tokens_generated) == (200, 0, 3)
    resume, pending = resume_from(first)
    run_one(engine, make_request(prompt_ids=pending + random_ids(2, 5), resume=resume, max_tokens=2))
    after = engine.stats()
    assert after.tokens_computed - before.tokens_computed == 1 + 5
    assert after.tokens_resumed - before.tokens_resumed == first.position == 202
    assert after.tokens_generated - before.tokens_generated == 2


def test_L3_R5_stateless_calls_are_those_of_a_fresh_engine_whatever_ran_before(tiny_tokenizer: Tokenizer) -> None:
    used = make_engine(small_model(), tiny_tokenizer, max_slots=2)
    run_all(used, [make_request(str(number), random_ids(number, 10 + number), max_tokens=5) for number in range(6)])
    request = make_request(prompt_ids=random_ids(40, 33), max_tokens=12, keep_state=False, logprobs=3, temperature=1.0)
    assert run_one(used, request).events == run_one(make_engine(small_model(), tiny_tokenizer), request).events


def test_M5_a_seed_gives_the_same_tokens_alone_in_a_batch_and_over_turns(tiny_tokenizer: Tokenizer) -> None:
    whole = make_request("whole", random_ids(1, 20), temperature=1.0, seed=11, max_tokens=20)
    alone = run_one(make_engine(small_model(), tiny_tokenizer), whole)
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=8)
    others = [make_request(str(n), random_ids(n, 9 + n), temperature=1.0, seed=n, max_tokens=15) for n in range(10)]
    assert run_all(engine, [*others, whole])["whole"].ids == alone.ids
    first = run_one(engine, make_request("part", random_ids(1, 20), temperature=1.0, seed=11, max_tokens=8))
    resume, pending = resume_from(first.end_state)
    second = run_one(engine, make_request("part", pending, resume=resume, temperature=1.0, seed=11, max_tokens=12))
    assert first.ids + second.ids == alone.ids


def test_penalties_count_the_tokens_of_earlier_turns(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    alone = run_one(engine, make_request(prompt_ids=random_ids(1, 20), repetition_penalty=5.0, max_tokens=30))
    assert alone.ids != reference_ids(random_ids(1, 20), 30)
    first = run_one(engine, make_request(prompt_ids=random_ids(1, 20), repetition_penalty=5.0, max_tokens=15))
    resume, pending = resume_from(first.end_state)
    assert sum(resume.generated_counts.values()) == 15
    second = run_one(engine, make_request(prompt_ids=pending, resume=resume, repetition_penalty=5.0, max_tokens=15))
    assert first.ids + second.ids == alone.ids
    assert second.end_state.generated_counts == alone.end_state.generated_counts


def test_R3_turn_that_rereads_the_log_equals_the_resumed_turn(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "repetition_penalty": 3.0}
    first = run_one(engine, make_request(prompt_ids=random_ids(1, 20), max_tokens=15, **sampling)).end_state
    resume, pending = resume_from(first)
    resumed = run_one(engine, make_request(prompt_ids=(*pending, 9), resume=resume, max_tokens=15, **sampling))
    counts = first.generated_counts
    again = make_request(prompt_ids=(*first.new_ids, 9), generated_counts=counts, max_tokens=15, **sampling)
    rebuilt = run_one(engine, again)
    assert rebuilt.ids == resumed.ids
    assert rebuilt.end_state.generated_counts == resumed.end_state.generated_counts
    assert rebuilt.end_state.position == resumed.end_state.position
    assert (rebuilt.finished.cached_tokens, resumed.finished.cached_tokens) == (0, 34)
    assert rebuilt.finished.prompt_tokens == resumed.finished.prompt_tokens


@pytest.mark.parametrize("token_budget", [4, 9, 64])
def test_prompt_logprobs_are_those_of_one_forward_pass(token_budget: int, tiny_tokenizer: Tokenizer) -> None:
    ids = random_ids(5, 30)
    engine = make_engine(small_model(), tiny_tokenizer, token_budget=token_budget)
    scoring = make_request("scoring", ids, prompt_logprobs=2, max_tokens=1)
    outcome = run_all(engine, [scoring, make_request("other", random_ids(6, 25))])["scoring"]
    assert [type(event).__name__ for event in outcome.events] == ["PromptScored", "TokenEvent", "Finished"]
    with torch.inference_mode():
        hidden, _ = small_model().forward(torch.tensor([ids]), small_model().initial_state(1))
        expected = small_model().logits(hidden)[0].log_softmax(-1)
    first, *scores = outcome.scored.logprobs
    assert first is None
    assert len(scores) == 29
    for index, score in enumerate(scores):
        assert score is not None
        assert score.token_id == ids[index + 1]
        assert score.logprob == pytest.approx(expected[index, ids[index + 1]].item(), abs=2e-4)
        assert [token_id for token_id, _ in score.top] == expected[index].topk(2).indices.tolist()


def test_prompt_logprobs_of_one_token_are_none_even_on_a_resumed_state(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    first = run_one(engine, make_request(prompt_logprobs=0))
    assert first.scored == PromptScored(logprobs=(None,))
    resume, pending = resume_from(first.end_state)
    second = run_one(engine, make_request(prompt_ids=pending, resume=resume, prompt_logprobs=0))
    assert second.scored == PromptScored(logprobs=(None,))


@pytest.mark.parametrize("phase", ["prompt", "decode", "scored"])
def test_a_row_that_is_not_finite_ends_alone(phase: str, tiny_tokenizer: Tokenizer) -> None:
    healthy = random_ids(1, 10)
    bad_id = next(index for index in range(512) if index not in {*healthy, *reference_ids(healthy, 8)})
    model = RandomModel()
    model.embedding.weight[bad_id] = float("nan")
    bad = {
        "prompt": make_request("bad", (5, bad_id)),
        "decode": make_request("bad", (5,), logit_bias={bad_id: 100.0}),  # sampled first, then fed
        "scored": make_request("bad", (bad_id, *range(40)), prompt_logprobs=0),
    }[phase]
    engine = make_engine(model, tiny_tokenizer, token_budget=20)
    results = run_all(engine, [bad, make_request("healthy", healthy)])
    assert results["healthy"].ids == reference_ids(healthy, 8)
    finished = results["bad"].finished
    assert finished.reason is FinishReason.ERROR
    assert isinstance(finished.error, NumericalError)
    assert finished.end_state is None
    assert finished.completion_tokens == (1 if phase == "decode" else 0)
    assert run_one(engine, make_request("next", healthy)).ids == reference_ids(healthy, 8)  # the row is clean again


@pytest.mark.usefixtures("waiting_or_overlapped")
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_S6_a_cancelled_request_ends_before_the_next_step(num_steps: int, tiny_tokenizer: Tokenizer) -> None:
    """Cancelled while it waits, while it reads its prompt, and while it decodes."""
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=1, token_budget=16)
    engine.add(make_request("other", random_ids(1, 20), max_tokens=2))
    engine.add(make_request("gone", random_ids(2, 40), max_tokens=50))
    events = [event for _ in range(num_steps) for event in engine.step()]
    engine.cancel("gone")
    engine.cancel("gone")
    engine.cancel("never heard of")
    (ended,) = [event for name, event in engine.step() if name == "gone"]
    assert isinstance(ended, Finished)
    assert (ended.reason, ended.end_state, ended.error) == (FinishReason.ABORT, None, None)
    assert ended.completion_tokens == sum(name == "gone" and isinstance(event, TokenEvent) for name, event in events)
    while engine.has_work:
        assert all(name == "other" for name, _ in engine.step())
    engine.cancel("gone")
    assert engine.step() == []
    assert run_one(engine, make_request("next", random_ids(1, 20))).ids == reference_ids(random_ids(1, 20), 8)


def test_R14_random_cancellations_free_their_slots_and_affect_no_other_request(tiny_tokenizer: Tokenizer) -> None:
    choose = random.Random(4)
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=3, token_budget=30)
    results = {str(index): Outcome() for index in clear_cases(tiny_tokenizer)[:30]}
    cancelled: set[str] = set()
    unseen = list(results)
    while unseen or engine.has_work:
        if unseen:
            engine.add(case(int(unseen.pop(0))))
        for name, event in engine.step():
            results[name].events.append(event)
        live = [name for name in results if name not in unseen and not results[name].is_over]
        if live and choose.random() < 0.2:
            cancelled.add(victim := choose.choice(live))
            engine.cancel(victim)
    assert 3 < len(cancelled) < 25
    for name, outcome in results.items():
        if name in cancelled:
            assert outcome.finished.reason is FinishReason.ABORT
            assert outcome.ids == _solo(int(name), tiny_tokenizer).ids[: len(outcome.ids)]
        else:
            assert_as_alone(outcome, int(name), tiny_tokenizer)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.usefixtures("waiting_or_overlapped")
def test_a_deadline_ends_waiting_and_running_requests(tiny_tokenizer: Tokenizer) -> None:
    now = 0.0
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=1, clock=lambda: now)
    engine.add(make_request("running", deadline=10.0, max_tokens=100))
    engine.add(make_request("waiting", deadline=10.0))
    engine.add(make_request("patient", deadline=11.0, max_tokens=2))
    assert [type(event) for _, event in engine.step()] == [TokenEvent]
    now = 10.0
    ended = {name: event for name, event in engine.step() if isinstance(event, Finished)}
    assert set(ended) == {"running", "waiting"}
    for finished in ended.values():
        assert finished.reason is FinishReason.ERROR
        assert isinstance(finished.error, DeadlineExceeded)
        assert finished.end_state is None
    engine.step()
    assert not engine.has_work


@pytest.mark.usefixtures("waiting_or_overlapped")
def test_abort_all_ends_everything(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=1)
    for name in "abc":
        engine.add(make_request(name))
    engine.step()
    ended = engine.abort_all()
    assert sorted(name for name, _ in ended) == ["a", "b", "c"]
    assert not engine.has_work
    assert engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.usefixtures("waiting_or_overlapped")
def test_the_queue_is_bounded_and_ids_are_unique(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=1, queue_limit=1)
    engine.add(make_request("a"))
    with pytest.raises(InvalidRequest, match="request id a is in use"):
        engine.add(make_request("a"))
    engine.add(make_request("b"))
    with pytest.raises(Overloaded):
        engine.add(make_request("c"))
    assert engine.stats().num_waiting == 2


@pytest.mark.usefixtures("waiting_or_overlapped")
def test_an_aborted_request_releases_the_text_it_held(tiny_tokenizer: Tokenizer) -> None:
    script = tiny_tokenizer.encode("one STO")
    engine = make_engine(ScriptedModel(script, vocab_size=512), tiny_tokenizer)
    engine.add(make_request(stop=("STOP",), max_tokens=100))
    events: list[Event] = []
    while len(events) < len(script):
        events += [event for _, event in engine.step()]
    engine.cancel("a")
    outcome = Outcome([*events, *(event for _, event in engine.step())])
    assert "".join(token.text for token in outcome.tokens) == "one "
    assert outcome.text == "one STO"
