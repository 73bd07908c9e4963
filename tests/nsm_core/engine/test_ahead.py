"""With a step launched ahead every request gives what it gives without, to the bit: events, end and state."""

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

from nsm_core.config import EngineConfig
from nsm_core.engine import ahead
from nsm_core.engine.ahead import may_look_ahead
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.failures import MAX_FAILURES_IN_A_ROW
from nsm_core.engine.request import Finished, FinishReason, GenerationRequest, PromptState, TokenEvent, joules_of
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import DeadlineExceeded, NumericalError, StepFailed
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.observer import ModelObserver
from nsm_core.sampling.device import LaunchedTokens
from nsm_core.tokenizer import Tokenizer
from tests.counts import scaled
from tests.fake_meters import FakeClock, FakeMeter
from tests.models import random_model, small_config
from tests.nsm_core.engine.harness import (
    FINGERPRINT,
    FakeLookAhead,
    Outcome,
    ScriptedModel,
    assert_log_and_state_agree,
    looking_ahead,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_all,
    run_one,
    small_model,
)

needs_native = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")


class Pair:
    """Two engines for one model, one of which looks ahead."""

    def __init__(
        self, model: SequenceModel, tokenizer: Tokenizer, executor: ExecutorFactory = EagerExecutor, **limits: Any
    ) -> None:
        self.model = model
        self.made: list[Any] = []

        def make(model: SequenceModel, *, num_rows: int, poison: bool) -> Any:
            self.made.append(looking_ahead(executor)(model, num_rows=num_rows, poison=poison))
            return self.made[-1]

        self.plain = make_engine(model, tokenizer, executor=executor, speculation="off", **limits)
        self.ahead = make_engine(model, tokenizer, executor=make, speculation="off", **limits)

    @property
    def fake(self) -> FakeLookAhead:
        fake = self.made[0].look_ahead
        assert isinstance(fake, FakeLookAhead)
        return fake

    def compare(self, requests: Sequence[GenerationRequest], *, arrivals: Sequence[int] = ()) -> dict[str, Outcome]:
        want = run_all(self.plain, requests, arrivals=arrivals)
        assert run_all(self.ahead, requests, arrivals=arrivals) == want
        assert self.ahead.stats().num_running == self.ahead.stats().num_waiting == 0
        return want


# --- random models, random mixtures of requests -------------------------------------------------------------------


@functools.cache
def native(pattern: str) -> tuple[SequenceModel, ExecutorFactory]:
    """Its bits depend neither on the batch nor on how a prompt is cut."""
    model = random_model(small_config(512, layer_pattern=pattern, window=20))
    model.embedding.weight.mul_(0.3)
    return model.eval(), functools.partial(NativeExecutor, weights=NativeWeights(model))


wishes = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14)},
    optional={
        "temperature": st.sampled_from([0.0, 0.8, 1.5]),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(0, 511), max_size=10).map(tuple),
        "stop": st.sampled_from([("e",), ("\n", "q"), ("qqq",)]),
        "ignore_eos": st.booleans(),
        "keep_state": st.booleans(),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.3]),
        "logprobs": st.sampled_from([None, None, None, 1]),
    },
)
prompts = st.builds(random_ids, st.integers(0, 30), st.sampled_from([1, 1, 2, 5, 33]))


@needs_native
@settings(max_examples=scaled(20, full=300), deadline=None)
@given(
    st.sampled_from(["N", "NW"]),
    st.lists(st.tuples(prompts, wishes), min_size=1, max_size=9),
    st.lists(st.integers(0, 20), max_size=9),
    st.integers(1, 4),
    st.sampled_from([4, 9, 64]),
)
def test_R9_R15_rows_that_join_and_leave_are_what_they_are_in_plain_steps(
    tiny_tokenizer: Tokenizer,
    pattern: str,
    cases: Sequence[tuple[tuple[int, ...], dict[str, Any]]],
    arrivals: Sequence[int],
    max_slots: int,
    token_budget: int,
) -> None:
    """A second turn on every kept state as well."""
    model, executor = native(pattern)
    pair = Pair(model, tiny_tokenizer, executor, max_slots=max_slots, token_budget=token_budget)
    requests = [make_request(str(index), ids, **wish) for index, (ids, wish) in enumerate(cases)]
    ends = pair.compare(requests, arrivals=arrivals[: len(requests)])
    again = []
    for name, outcome in ends.items():
        if outcome.finished.end_state is not None:
            resume, pending = resume_from(outcome.finished.end_state)
            again.append(make_request(name, (*pending, 5), resume=resume, max_tokens=6, temperature=0.9))
    pair.compare(again)


@needs_native
def test_rows_are_left_out_in_these_texts(tiny_tokenizer: Tokenizer) -> None:
    """What the test above compares would be nothing otherwise."""
    model, executor = native("NW")
    pair = Pair(model, tiny_tokenizer, executor)
    stops = tuple(range(0, 512, 64))
    pair.compare(
        [
            make_request(
                str(seed), random_ids(seed, 5), stop_token_ids=stops, temperature=1.0, seed=seed, max_tokens=90
            )
            for seed in range(8)
        ]
    )
    assert pair.fake.num_left_out > 3


cancels = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 7)), max_size=6)


@settings(max_examples=scaled(40, full=1000), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["", "id", "string"])), min_size=1, max_size=8),
    cancels,
    st.integers(1, 3),
)
def test_S6_R14_cancels_at_any_step_end_one_request_once(
    tiny_tokenizer: Tokenizer, sizes: Sequence[tuple[int, str]], cancels: Sequence[tuple[int, int]], max_slots: int
) -> None:
    """The others are what they are alone; slots are given to others while steps are in flight, and while they pause."""
    ids = [tiny_tokenizer.encode_bytes(bytes([byte]))[0] for byte in b"abcjzq~abcdefghijk"]
    pair = Pair(ScriptedModel(ids, vocab_size=512), tiny_tokenizer, max_slots=max_slots)
    wishes: dict[str, dict[str, Any]] = {
        "": {},
        "id": {"stop_token_ids": (ids[5],)},
        "string": {"stop": ("jz?", "q~a", "~x")},
    }
    requests = [make_request(str(index), max_tokens=size, **wishes[stop]) for index, (size, stop) in enumerate(sizes)]
    assert all(may_look_ahead(sequence_of(tiny_tokenizer, request)) for request in requests)
    outcomes = {request.request_id: Outcome() for request in requests}
    for request in requests:
        pair.ahead.add(request)
    num_steps, gone = 0, set[str]()
    while pair.ahead.has_work:
        for at, index in cancels:
            if at == num_steps and index < len(requests) and not outcomes[str(index)].is_over:
                pair.ahead.cancel(str(index))
                gone.add(str(index))
        for name, event in pair.ahead.step():
            outcomes[name].events.append(event)
        num_steps += 1
    assert pair.made[0].pool.num_leased == 0
    for request in requests:
        outcome, want = outcomes[request.request_id], run_one(pair.plain, request)
        if request.request_id not in gone:
            assert outcome == want
        else:
            assert outcome.finished.reason is FinishReason.ABORT
            assert outcome.tokens == want.tokens[: len(outcome.tokens)]
            assert outcome.finished.completion_tokens == len(outcome.tokens)


# --- how far it goes ----------------------------------------------------------------------------------------------


class Noting(EagerExecutor):
    """Notes what is asked of it, and when its tokens are waited for."""

    notes: list[str]

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.notes.append(f"step {len(rows)}")
        return super().step(rows, ids)

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.notes.append(f"read {len(rows)}")
        return super().read(rows, ids)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    wait = LaunchedTokens.wait
    monkeypatch.setattr(Noting, "notes", found, raising=False)

    def noting_wait(tokens: LaunchedTokens) -> list[int]:
        found.append("wait")
        return wait(tokens)

    monkeypatch.setattr(LaunchedTokens, "wait", noting_wait)
    return found


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(
    tiny_tokenizer: Tokenizer, notes: list[str]
) -> None:
    engine = Pair(small_model(), tiny_tokenizer, Noting).ahead
    engine.add(make_request("a", random_ids(1, 5), max_tokens=3))
    assert [type(event) for _, event in engine.step()] == [TokenEvent]
    assert notes == ["read 1", "step 1", "wait"]
    engine.add(make_request("b", random_ids(2, 7), max_tokens=1))  # comes while a step is in flight, and rides along
    assert [name for name, _ in engine.step()] == ["a"]
    assert notes[3:] == ["step 1", "read 1", "wait"]
    assert [name for name, _ in engine.step()] == ["a", "a", "b", "b"]
    assert notes[6:] == ["wait"]  # both end by max_tokens, which is known: nothing is left to launch
    assert not engine.has_work


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_beside_a_request_that_may_not_look_ahead_every_step_is_waited_for(
    tiny_tokenizer: Tokenizer, notes: list[str], wish: dict[str, Any]
) -> None:
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, Noting)
    pair.compare(
        [make_request("a", (4, 9), max_tokens=12), make_request("b", (5,), max_tokens=3, **wish)], arrivals=(0, 4)
    )
    del notes[:]
    pair.ahead.add(make_request("a", (4, 9), max_tokens=12))
    for _ in range(4):
        pair.ahead.step()
    assert notes.count("wait") == 4
    pair.ahead.add(make_request("b", (5,), max_tokens=3, **wish))
    pair.ahead.step()
    assert notes[-1] == "wait"  # the step in flight, and none behind it
    num_waits = notes.count("wait")
    for _ in range(3):
        assert len(pair.ahead.step()) > 1
    assert notes.count("wait") == num_waits
    pair.ahead.step()
    assert notes.count("wait") == num_waits + 1  # it has ended


def sequence_of(tokenizer: Tokenizer, request: GenerationRequest) -> RunningSequence:
    return RunningSequence(request, tokenizer, 0.0)


def test_who_may_look_ahead(tiny_tokenizer: Tokenizer) -> None:
    may = functools.partial(sequence_of, tiny_tokenizer)
    assert may_look_ahead(may(make_request(temperature=1.0, stop_token_ids=(1, 2), ignore_eos=False)))
    assert may_look_ahead(may(make_request(stop=("\n\nUser:",))))
    assert may_look_ahead(may(make_request(stop=("e",), keep_state=False)))
    assert not may_look_ahead(may(make_request(stop=("e",))))  # many tokens have that letter
    for change in ({"include_routing": True}, {"num_states": 2}, {"sampled_ids": (4,)}):
        assert not may_look_ahead(may(dataclasses.replace(make_request(), **change)))
    assert may_look_ahead(may(dataclasses.replace(make_request(), keep_states_at=(1,))))
    scored = may(make_request(prompt_logprobs=0))
    assert not may_look_ahead(scored)
    scored.take(5)  # its prompt has been read
    assert may_look_ahead(scored)


class Said:
    """A model that says a text, and a request for it."""

    def __init__(self, tokenizer: Tokenizer, text: str, *, by_byte: bool) -> None:
        parts = [bytes([byte]) for byte in text.encode()]
        ids = [token_id for part in parts for token_id in tokenizer.encode_bytes(part)]
        self.model = ScriptedModel(ids if by_byte else tokenizer.encode(text), vocab_size=512)

    def compare(self, tokenizer: Tokenizer, **wish: Any) -> tuple[Outcome, Pair]:
        """Beside a request that is never held up."""
        pair = Pair(self.model, tokenizer)
        request = make_request(**{"max_tokens": 300, "ignore_eos": False, **wish})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ahead, "MAX_PAUSING_SHARE", 1.0)
            outcome = pair.compare([request, make_request("b", max_tokens=9)])["a"]
        if request.keep_state:
            assert_log_and_state_agree(self.model, outcome.end_state)
        return outcome, pair


CHANT = "the best of times, the worst of times, €é the best of times, the worst of times, €é "


@pytest.mark.parametrize(
    "stop",
    [
        ("worst",),
        ("best of Times", "of time"),
        ("never said",),
        ("times, the best",),
        ("the worst of times, €é the best of times, t",),
        ("€x", "é t"),
        (", €é the best of times, the worst of times, never", "the worst of times, €é the best of times, the worse"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("by_byte", [True, False], ids=["bytes", "tokens"])
def test_S2_R12_a_state_is_gone_back_to_where_a_stop_string_began(
    tiny_tokenizer: Tokenizer, stop: tuple[str, ...], by_byte: bool
) -> None:
    Said(tiny_tokenizer, CHANT * 2, by_byte=by_byte).compare(tiny_tokenizer, stop=stop)


@settings(max_examples=scaled(60, full=1500), deadline=None)
@given(st.data(), st.text("ab", min_size=1, max_size=160), st.integers(1, 170), st.booleans())
def test_S2_R12_any_stop_strings_in_any_text(
    tiny_tokenizer: Tokenizer, data: st.DataObject, text: str, max_tokens: int, keep_state: bool
) -> None:
    """Two letters: stop strings begin in vain, long ones are held over more steps than a second copy takes."""
    places = st.integers(0, len(text) - 1)
    part = st.builds(lambda start, length: text[start : start + length], places, st.integers(1, 120))
    stop = tuple(data.draw(st.lists(st.one_of(part, part.map(lambda found: found + "a")), max_size=3)))
    said = Said(tiny_tokenizer, text, by_byte=data.draw(st.booleans()))
    said.compare(tiny_tokenizer, stop=stop, max_tokens=max_tokens, keep_state=keep_state)


def test_a_text_that_is_held_back_costs_one_step_and_a_long_one_waits_for_its_second_copy(
    tiny_tokenizer: Tokenizer, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "MAX_PAUSING_SHARE", 1.0)
    said = Said(tiny_tokenizer, "one\ntwo q" + "x" * 90 + "y", by_byte=True)
    pair = Pair(said.model, tiny_tokenizer, Noting)
    run_one(pair.ahead, make_request(stop=("\n\nUser:",), max_tokens=20))
    assert pair.fake.num_left_out == 1
    assert notes.count("wait") == 21
    del notes[:]
    pair.compare([make_request(stop=("q" + "x" * 91,), max_tokens=99)])
    assert notes.count("wait") == 99 + 1 - 3  # one step without a token; three were waited for as plain ones are


@pytest.mark.parametrize("budget", [2, 7, 64])
@pytest.mark.parametrize("places", [(1,), (2, 3), (1, 4, 9), (9,), (3, 10)])
def test_states_in_a_prompt_are_those_of_their_places(
    tiny_tokenizer: Tokenizer, budget: int, places: tuple[int, ...]
) -> None:
    """The next chunk is launched before they are taken."""
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, max_slots=2, token_budget=budget)
    request = dataclasses.replace(make_request(prompt_ids=random_ids(1, 10), max_tokens=4), keep_states_at=places)
    outcome = pair.compare([request, make_request("b", random_ids(2, 12))])["a"]
    assert [event.position for event in outcome.events if isinstance(event, PromptState)] == list(places)


def test_states_in_a_prompt_of_a_step_that_nobody_waited_for_are_waited_for(tiny_tokenizer: Tokenizer) -> None:
    """Beside log-probabilities steps are not launched ahead; and a step that ends inside a prompt samples nothing."""
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, max_slots=2, token_budget=4)
    request = make_request(prompt_ids=random_ids(1, 10), max_tokens=2, logprobs=0, keep_state=False)
    pair.compare([dataclasses.replace(request, keep_states_at=(3, 8))])
    assert pair.fake.num_beside == 0


def test_scored_prompts_and_given_ids_come_first_and_what_follows_looks_ahead(
    tiny_tokenizer: Tokenizer, notes: list[str]
) -> None:
    model = ScriptedModel(list(range(100, 140)), vocab_size=512, prompt_len=3)
    pair = Pair(model, tiny_tokenizer, Noting)
    request = make_request(prompt_ids=(1, 2, 3), max_tokens=12, prompt_logprobs=0)
    outcome = pair.compare([request])["a"]
    assert notes.count("wait") > 8
    del notes[:]
    request = dataclasses.replace(request, prompt_logprobs=None, sampled_ids=tuple(outcome.ids[:4]))
    assert pair.compare([request])["a"].tokens == outcome.tokens[4:]
    assert notes.count("wait") > 5


# --- ends of every kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("place", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("end", ["stop id", "end of text", "both kept", "stop string"])
def test_R12_the_state_is_that_of_the_end(tiny_tokenizer: Tokenizer, max_tokens: int, place: int, end: str) -> None:
    ids = [tiny_tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    if end == "end of text":
        ids[place] = tiny_tokenizer.end_of_text_id
    pair = Pair(ScriptedModel(ids, vocab_size=512), tiny_tokenizer)
    wish: dict[str, Any] = {"stop": ("abcdefgh"[place],), "keep_state": False} if end == "stop string" else {}
    if end in ("stop id", "both kept"):
        wish["stop_token_ids"] = (ids[place],)
    requests = [make_request("a", max_tokens=max_tokens, ignore_eos=False, **wish)]
    if end == "both kept":  # another one goes on beside it, in a row in front of it
        requests.insert(0, make_request("b", max_tokens=8))
    outcome = pair.compare(requests)["a"]
    is_stopped = place < max_tokens
    assert outcome.finished.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    if end != "stop string":
        assert_log_and_state_agree(pair.model, outcome.end_state)


class FailsAt(ScriptedModel):
    """Its logits are not finite from a place on."""

    place = 0

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden[..., :1] >= self.place, torch.nan, super().logits(hidden))


@pytest.mark.parametrize("num_good", range(5))
def test_numbers_that_are_not_finite_end_their_request_alone(tiny_tokenizer: Tokenizer, num_good: int) -> None:
    """The other one has fewer tokens before it than the place where it would fail."""
    model = FailsAt(list(range(100, 140)), vocab_size=512, prompt_len=1)
    model.place = 10 + num_good
    pair = Pair(model, tiny_tokenizer)
    long, short = random_ids(3, 10), make_request("short", max_tokens=6)
    requests = [make_request("long", long, max_tokens=9), short]
    want, got = run_all(pair.plain, requests), run_all(pair.ahead, requests)
    assert got["short"] == want["short"]
    assert got["short"].finished.reason is FinishReason.LENGTH
    assert got["long"].tokens == want["long"].tokens
    assert len(got["long"].tokens) == num_good
    assert isinstance(got["long"].finished.error, NumericalError)
    assert str(got["long"].finished.error) == str(want["long"].finished.error)


# --- faults -------------------------------------------------------------------------------------------------------


class Faulty:
    """An engine that looks ahead, whose next launches or waits fail."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        self.num_launches = self.num_waits = 0  # that fail
        self.pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tokenizer, **limits)
        self.engine = self.pair.ahead
        self.pool = self.pair.made[0].pool
        step, wait = FakeLookAhead.step, LaunchedTokens.wait

        def failing_step(fake: FakeLookAhead, rows: Sequence[int], upcoming: Any) -> Tensor:
            self.num_launches -= 1
            hidden = step(fake, rows, upcoming)  # the rows are changed
            return self.fail() if self.num_launches >= 0 else hidden

        def failing_wait(tokens: LaunchedTokens) -> list[int]:
            self.num_waits -= 1
            return self.fail() if self.num_waits >= 0 else wait(tokens)

        monkeypatch.setattr(FakeLookAhead, "step", failing_step)
        monkeypatch.setattr(LaunchedTokens, "wait", failing_wait)

    @staticmethod
    def fail() -> Any:
        raise ZeroDivisionError("a fault")


@pytest.fixture
def faulty(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return Faulty(tiny_tokenizer, monkeypatch, max_slots=2)


def assert_failed(events: Sequence[tuple[str, Any]], name: str) -> None:
    (finished,) = [event for own, event in events if own == name and isinstance(event, Finished)]
    assert isinstance(finished.error, StepFailed)
    assert finished.end_state is None


def test_a_launch_that_fails_loses_nothing_of_the_step_in_flight(faulty: Faulty) -> None:
    """`stops` ends in it as it would have; the others have its token, and end."""
    engine = faulty.engine
    stops, goes_on = make_request("stops", stop_token_ids=(101,)), make_request("goes on")
    engine.add(stops)
    engine.add(goes_on)
    engine.add(make_request("waits", max_tokens=2))
    engine.step()
    faulty.num_launches = 1
    events = engine.step()
    assert [event.token_id for name, event in events if isinstance(event, TokenEvent)] == [101, 101]
    (end,) = [event for name, event in events if name == "stops" and isinstance(event, Finished)]
    assert end == run_one(faulty.pair.plain, stops).finished
    assert_failed(events, "goes on")
    assert faulty.pool.num_leased == 0
    assert engine.stats().num_failed_steps == 1
    events = [event for _ in range(2) for event in engine.step()]
    assert [type(event) for name, event in events if name == "waits"] == [TokenEvent, TokenEvent, Finished]


def test_a_wait_that_fails_ends_the_requests_of_the_step_in_flight_and_of_the_one_behind_it(faulty: Faulty) -> None:
    engine = faulty.engine
    engine.add(make_request("a"))
    engine.step()
    engine.add(make_request("behind"))
    faulty.num_waits = 1
    events = engine.step()
    assert_failed(events, "a")
    assert_failed(events, "behind")
    assert faulty.pool.num_leased == 0
    assert not engine.has_work
    assert engine.step() == []
    assert run_one(engine, make_request()) == run_one(faulty.pair.plain, make_request())


def test_the_first_launch_may_fail_too(faulty: Faulty) -> None:
    faulty.num_launches = 1
    faulty.engine.add(make_request())
    assert_failed(faulty.engine.step(), "a")
    assert run_one(faulty.engine, make_request()).finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("what", ["num_launches", "num_waits"])
def test_failures_in_a_row_end_the_engine(faulty: Faulty, what: str) -> None:
    setattr(faulty, what, MAX_FAILURES_IN_A_ROW)
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        faulty.engine.add(make_request())
        assert_failed(faulty.engine.step(), "a")
    faulty.engine.add(make_request())
    with pytest.raises(ZeroDivisionError):
        faulty.engine.step()


def test_an_end_that_fails_ends_the_requests_of_its_step_and_not_those_that_came_after(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = faulty.engine
    engine.add(make_request("a", max_tokens=2))
    engine.step()
    engine.add(make_request("later", max_tokens=2))
    pack = faulty.pool.pack
    monkeypatch.setattr(faulty.pool, "pack", lambda row: 1 / 0)
    assert_failed(engine.step(), "a")
    monkeypatch.setattr(faulty.pool, "pack", pack)
    events = [event for _ in range(2) for _, event in engine.step()]
    assert [type(event) for event in events] == [TokenEvent, TokenEvent, Finished]
    assert not engine.has_work


# --- early ends, accounts, the thread -------------------------------------------------------------------------------


def test_a_deadline_that_passes_in_flight_and_abort_all(tiny_tokenizer: Tokenizer) -> None:
    now = 0.0
    pair = Pair(small_model(), tiny_tokenizer, clock=lambda: now)
    pair.ahead.add(make_request("late", deadline=10.0, max_tokens=100))
    pair.ahead.step()
    now = 10.0
    ((_, end),) = pair.ahead.step()
    assert isinstance(end, Finished)
    assert isinstance(end.error, DeadlineExceeded)
    assert end.completion_tokens == 1
    for name in "abc":
        pair.ahead.add(make_request(name))
    pair.ahead.step()
    assert sorted(name for name, _ in pair.ahead.abort_all()) == ["a", "b", "c"]
    assert not pair.ahead.has_work
    assert pair.ahead.step() == []
    assert pair.made[0].pool.num_leased == 0


def test_steps_tokens_and_rows_are_counted_as_in_plain_steps(tiny_tokenizer: Tokenizer) -> None:
    """One ends by a stop id, while it takes part in the step behind: nothing is counted twice, or for nobody."""
    model = ScriptedModel(list(range(100, 140)), vocab_size=512)
    pair = Pair(model, tiny_tokenizer)
    pair.compare([make_request("a", max_tokens=9), make_request("b", max_tokens=9, stop_token_ids=(103,))])
    plain, got = pair.plain.stats(), pair.ahead.stats()
    assert dataclasses.replace(got, step_seconds=0.0) == dataclasses.replace(plain, step_seconds=0.0)
    assert got.step_seconds > 0


class WorkingMeter(FakeMeter):
    """A joule for each reading."""

    def read(self) -> tuple[object, ...]:  # type: ignore[override]
        self.joules += 1.0
        return super().read()


def engine_with(tokenizer: Tokenizer, **parts: Any) -> Engine:
    config = EngineConfig(max_slots=2, token_budget=64)
    return Engine(small_model(), tokenizer, fingerprint=FINGERPRINT, config=config, executor=looking_ahead(), **parts)


def test_M6_requests_pay_for_what_they_had_computed_and_nobody_for_the_rest(tiny_tokenizer: Tokenizer) -> None:
    engine = engine_with(tiny_tokenizer, meter=WorkingMeter())
    outcomes = {name: Outcome() for name in "abcd"}
    for name in "abcd":
        engine.add(make_request(name, random_ids(1, 30), max_tokens=6, stop=()))
    for number in range(100):
        if number == 2:
            engine.cancel("b")
        for name, event in engine.step():
            outcomes[name].events.append(event)
        if not engine.has_work:
            break
    charged = joules_of(outcome.finished for outcome in outcomes.values())
    stats = engine.stats()
    assert all(outcome.finished.energy[0].joules > 0 for outcome in outcomes.values())
    assert charged == pytest.approx(sum(use.joules for use in stats.request_energy), rel=1e-9)
    assert charged == pytest.approx(stats.energy[0].joules - 2, abs=1)


def test_the_model_is_looked_at_between_steps(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    engine = engine_with(tiny_tokenizer, observer=ModelObserver(small_model(), clock=clock))
    want = run_one(engine_with(tiny_tokenizer), make_request(max_tokens=12))
    got = Outcome()
    engine.add(make_request(max_tokens=12))
    while engine.has_work:
        clock.now += 60.0 * (len(got.events) % 3 == 0)
        got.events += [event for _, event in engine.step()]
    assert got == want
    assert engine.stats().num_observed > 2


async def test_the_thread_stops_with_a_step_in_flight(tiny_tokenizer: Tokenizer) -> None:
    engine = AsyncEngine(engine_with(tiny_tokenizer))
    await engine.start()
    handle = engine.submit(make_request(max_tokens=100_000))
    events = handle.events()
    assert isinstance(await anext(events), TokenEvent)
    other = engine.submit(make_request("b", (4, 5), max_tokens=5))
    assert Outcome([event async for event in other.events()]).finished.reason is FinishReason.LENGTH
    await engine.stop()
    rest = [event async for event in events]
    assert isinstance(rest[-1], Finished)
    assert sum(isinstance(event, Finished) for event in rest) == 1
    assert rest[-1].reason is FinishReason.ABORT
