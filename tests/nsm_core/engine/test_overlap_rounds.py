"""Launches of several tokens a row: when the engine makes them, and what a request sees of them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from nsm_core.engine import overlap
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, FinishReason, GenerationRequest, TokenEvent, joules_of
from nsm_core.errors import StepFailed
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FakeOverlap,
    ScriptedModel,
    make_engine,
    make_request,
    overlapped,
    random_ids,
    run_all,
    small_model,
)
from tests.support.counts import scaled
from tests.support.fake_meters import FakeMeter

ROUNDS = 4


class Subject:
    """An engine that launches ROUNDS tokens at a time, and its fake device."""

    def __init__(self, tokenizer: Tokenizer, model: Any = None, **limits: Any) -> None:
        made: list[Any] = []

        def make(model: Any, *, num_rows: int, poison: bool) -> Any:
            made.append(overlapped(num_rounds=ROUNDS)(model, num_rows=num_rows, poison=poison))
            return made[-1]

        self.engine: Engine = make_engine(model or small_model(), tokenizer, executor=make, speculation="off", **limits)
        self.fake: FakeOverlap = made[0].overlap
        self.pool = made[0].pool

    def step(self) -> tuple[list[int], list[Any]]:
        """The plain ids, and the other events."""
        events = [event for _, event in self.engine.step()]
        return [token_id for batch in self.engine.take_tokens() for token_id in batch.ids.tolist()], events


@pytest.fixture
def subject(tiny_tokenizer: Tokenizer) -> Subject:
    return Subject(tiny_tokenizer, ScriptedModel(list(range(100, 180)), vocab_size=512))


def test_a_request_alone_gets_its_first_token_by_a_step_and_then_several_at_a_time(subject: Subject) -> None:
    subject.engine.add(make_request(max_tokens=11), tag=0)
    plain, (first,) = subject.step()
    assert (plain, first.token_id) == ([], 100)
    assert subject.fake.num_decodes == 1  # launched behind the prompt
    assert subject.step() == ([101, 102, 103, 104], [])
    assert subject.step() == ([105, 106, 107, 108], [])
    plain, (last, end) = subject.step()
    assert (plain, last.token_id, end.reason) == ([109], 110, FinishReason.LENGTH)
    assert subject.fake.num_decodes == 3
    assert not subject.engine.has_work


def test_M6_requests_of_a_launch_are_charged_by_the_tokens_that_each_decoded(tiny_tokenizer: Tokenizer) -> None:
    meter = FakeMeter()
    engine = Subject(tiny_tokenizer, meter=meter).engine
    for tag, (name, num_tokens) in enumerate({"a": 2, "b": 4}.items()):
        engine.add(make_request(name, max_tokens=1 + num_tokens), tag=tag)
    engine.step()  # the prompts and a token of each; the launch behind them makes the rest
    meter.joules += 6.0
    ends = {name: event for name, event in engine.step() if isinstance(event, Finished)}
    assert {name: joules_of([end]) for name, end in ends.items()} == pytest.approx({"a": 2.0, "b": 4.0})


def test_a_prompt_that_comes_is_read_by_the_next_launch(subject: Subject) -> None:
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.step()
    subject.engine.add(make_request("b", (0,), max_tokens=60), tag=1)
    num_decodes = subject.fake.num_decodes
    subject.step()  # the launch in flight; the one behind it has the prompt
    assert subject.fake.num_decodes == num_decodes
    assert [event.index for event in subject.step()[1]] == [1]


def test_few_prompts_right_behind_others_wait_for_one_launch_of_rounds(subject: Subject) -> None:
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.step()
    subject.engine.add(make_request("b", (0,), max_tokens=60), tag=1)
    subject.step()  # the prompt of b is in flight
    subject.engine.add(make_request("c", (0,), max_tokens=60), tag=2)
    num_decodes = subject.fake.num_decodes
    subject.step()
    assert subject.fake.num_decodes == num_decodes + 1  # of a and b; the prompt of c waits
    subject.step()
    assert subject.fake.num_decodes == num_decodes + 1
    subject.step()
    assert subject.fake.num_decodes == num_decodes + 2


def test_many_prompts_right_behind_others_are_read_at_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "FEW_PROMPT_TOKENS", 1)
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.step()
    subject.engine.add(make_request("b", (0,), max_tokens=60), tag=1)
    subject.step()
    subject.engine.add(make_request("c", (0, 0), max_tokens=60), tag=2)
    num_decodes = subject.fake.num_decodes
    subject.step()
    assert subject.fake.num_decodes == num_decodes


@pytest.mark.parametrize("other", [{"logprobs": 1}, {"stop": ("x",)}, {"repetition_penalty": 1.5}], ids=str)
def test_beside_a_request_that_needs_the_host_there_are_no_rounds(subject: Subject, other: dict[str, Any]) -> None:
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.engine.add(make_request("b", max_tokens=60, **other), tag=1)
    for _ in range(6):
        subject.step()
    assert subject.fake.num_decodes == 0


def test_requests_without_a_tag_have_no_rounds(subject: Subject) -> None:
    subject.engine.add(make_request("a", max_tokens=60))
    for _ in range(6):
        subject.step()
    assert subject.fake.num_decodes == 0


def test_a_stop_id_inside_a_launch_ends_the_request_there_and_the_others_go_on(tiny_tokenizer: Tokenizer) -> None:
    model = ScriptedModel(list(range(100, 180)), vocab_size=512)
    subject, plain = Subject(tiny_tokenizer, model), make_engine(model, tiny_tokenizer, speculation="off")
    requests = [make_request("a", max_tokens=30, stop_token_ids=(106,)), make_request("b", max_tokens=13)]
    assert run_all(subject.engine, requests, reads_ids=tiny_tokenizer) == run_all(plain, requests)
    got, want = subject.engine.stats(), plain.stats()
    assert dataclasses.replace(got, step_seconds=0.0) == dataclasses.replace(want, step_seconds=0.0)
    assert subject.pool.num_leased == 0


def test_S6_R14_a_cancelled_request_ends_once_and_its_tokens_in_flight_are_nobodys(subject: Subject) -> None:
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.engine.add(make_request("b", max_tokens=60), tag=1)
    subject.step()
    subject.step()
    subject.engine.cancel("a")
    plain, (end,) = subject.step()
    assert end.reason is FinishReason.ABORT
    assert end.completion_tokens == 1 + ROUNDS
    assert plain == [105, 106, 107, 108]  # of the other one alone
    subject.engine.add(make_request("c", (0,), max_tokens=60), tag=2)  # in the slot that is free
    subject.step()
    plain, (first,) = subject.step()
    assert first.token_id == 100
    assert subject.pool.num_leased == 2


SCRIPT = list(range(100, 180))


def random_request(rng: random.Random, name: str) -> GenerationRequest:
    """Some end inside a launch, some need the host after each token."""
    params: dict[str, Any] = rng.choice(
        [{}, {}, {"stop_token_ids": (SCRIPT[rng.randrange(20)],)}, {"stop": ("e",)}, {"logprobs": 1}]
    )
    ids = random_ids(rng.randrange(99), rng.choice([1, 2, 5, 33]))
    return make_request(name, ids, max_tokens=rng.randint(1, 30), **params)


def run_with_cancels(
    subject: Subject, requests: Sequence[GenerationRequest], rng: random.Random
) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    """Ids and ends by name. One request in ten has no tag; some are cancelled, of those that run."""
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, Finished] = {}
    waiting = list(requests)
    while waiting or subject.engine.has_work:
        while waiting and rng.random() < 0.4:
            request = waiting.pop(0)
            subject.engine.add(request, tag=int(request.request_id) if rng.random() < 0.9 else None)
        if rng.random() < 0.1:
            subject.engine.cancel(rng.choice(requests).request_id)
        events = subject.engine.step()
        for batch in subject.engine.take_tokens():
            for tag, token_id in zip(batch.tags.tolist(), batch.ids.tolist(), strict=True):
                ids[str(tag)].append(token_id)
        for name, event in events:
            assert name not in ends
            if isinstance(event, TokenEvent):
                ids[name].append(event.token_id)
            elif isinstance(event, Finished):
                ends[name] = event
    return ids, ends


@pytest.mark.parametrize("seed", range(scaled(20, full=300)))
def test_S6_R14_cancels_and_arrivals_between_launches_change_no_other_request(
    tiny_tokenizer: Tokenizer, seed: int
) -> None:
    rng, model = random.Random(seed), ScriptedModel(SCRIPT, vocab_size=512)
    subject = Subject(tiny_tokenizer, model, max_slots=rng.randint(1, 6), token_budget=20)
    requests = [random_request(rng, str(index)) for index in range(rng.randint(1, 12))]
    ids, ends = run_with_cancels(subject, requests, rng)
    for name, want in run_all(make_engine(model, tiny_tokenizer, speculation="off"), requests).items():
        assert ends[name].completion_tokens == len(ids[name])
        if ends[name].reason is FinishReason.ABORT:
            assert ids[name] == want.ids[: len(ids[name])]
        else:
            assert (ids[name], ends[name].reason) == (want.ids, want.finished.reason)
    assert subject.pool.num_leased == 0


def test_a_row_that_the_device_left_out_too_early_ends_with_an_error(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a stream that waits for ever."""
    subject.engine.add(make_request("a", max_tokens=60), tag=0)
    subject.step()
    monkeypatch.setattr(FakeOverlap, "_goes_on", lambda fake, row, token_id: False)
    ends: list[Any] = []
    while subject.engine.has_work:
        ends += [event for event in subject.step()[1] if isinstance(event, Finished)]
    (end,) = ends
    assert isinstance(end.error, StepFailed)
