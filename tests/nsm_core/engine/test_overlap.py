"""Overlapped steps give every request the events, end and state of plain steps, to the bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.engine.overlap import may_overlap
from nsm_core.engine.request import FinishReason, GenerationRequest, TokenEvent
from nsm_core.engine.sequence import RunningSequence
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    ScriptedModel,
    make_request,
    random_ids,
    resume_from,
    run_one,
    small_model,
)
from tests.nsm_core.engine.overlap_pairs import Pair, RecordingExecutor
from tests.support.counts import scaled
from tests.support.models import random_model, small_config

needs_native = pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")


# --- random models, random mixtures of requests -------------------------------------------------------------------


@functools.cache
def native(pattern: str) -> tuple[SequenceModel, ExecutorFactory]:
    """Its bits depend neither on the batch nor on how a prompt is cut."""
    model = random_model(small_config(512, layer_pattern=pattern, window=20))
    model.embedding.weight.mul_(0.3)
    return model.eval(), functools.partial(NativeExecutor, weights=NativeWeights(model))


params = st.fixed_dictionaries(
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
    st.lists(st.tuples(prompts, params), min_size=1, max_size=9),
    st.lists(st.integers(0, 20), max_size=9),
    st.integers(1, 4),
    st.sampled_from([4, 9, 64]),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_R9_R15_rows_that_join_and_leave_equal_plain_steps(
    tiny_tokenizer: Tokenizer,
    pattern: str,
    cases: Sequence[tuple[tuple[int, ...], dict[str, Any]]],
    arrivals: Sequence[int],
    max_slots: int,
    token_budget: int,
    background: Sequence[bool],
) -> None:
    """A second turn on every kept state as well. Some requests stand behind the others, and skip steps."""
    model, executor = native(pattern)
    pair = Pair(model, tiny_tokenizer, executor, max_slots=max_slots, token_budget=token_budget)
    requests = [
        dataclasses.replace(make_request(str(index), ids, **params), is_background=background[index])
        for index, (ids, params) in enumerate(cases)
    ]
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
    assert pair.fake.num_skipped > 3


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
    params: dict[str, dict[str, Any]] = {
        "": {},
        "id": {"stop_token_ids": (ids[5],)},
        "string": {"stop": ("jz?", "q~a", "~x")},
    }
    requests = [make_request(str(index), max_tokens=size, **params[stop]) for index, (size, stop) in enumerate(sizes)]
    assert all(may_overlap(sequence_of(tiny_tokenizer, request)) for request in requests)
    results = {request.request_id: Outcome() for request in requests}
    for request in requests:
        pair.overlapped.add(request)
    num_steps, gone = 0, set[str]()
    while pair.overlapped.has_work:
        for at, index in cancels:
            if at == num_steps and index < len(requests) and not results[str(index)].is_over:
                pair.overlapped.cancel(str(index))
                gone.add(str(index))
        for name, event in pair.overlapped.step():
            results[name].events.append(event)
        num_steps += 1
    assert pair.made[0].pool.num_leased == 0
    for request in requests:
        outcome, want = results[request.request_id], run_one(pair.plain, request)
        if request.request_id not in gone:
            assert outcome == want
        else:
            assert outcome.finished.reason is FinishReason.ABORT
            assert outcome.tokens == want.tokens[: len(outcome.tokens)]
            assert outcome.finished.completion_tokens == len(outcome.tokens)


# --- how far it goes ----------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(
    tiny_tokenizer: Tokenizer, notes: list[str]
) -> None:
    engine = Pair(small_model(), tiny_tokenizer, RecordingExecutor).overlapped
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
    "params",
    [
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
    ],
    ids=lambda params: next(iter(params)),
)
def test_overlap_beside_a_blocking_request_waits_for_every_step(
    tiny_tokenizer: Tokenizer, notes: list[str], params: dict[str, Any]
) -> None:
    pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tiny_tokenizer, RecordingExecutor)
    pair.compare(
        [make_request("a", (4, 9), max_tokens=12), make_request("b", (5,), max_tokens=3, **params)], arrivals=(0, 4)
    )
    del notes[:]
    pair.overlapped.add(make_request("a", (4, 9), max_tokens=12))
    for _ in range(4):
        pair.overlapped.step()
    assert notes.count("wait") == 4
    pair.overlapped.add(make_request("b", (5,), max_tokens=3, **params))
    pair.overlapped.step()
    assert notes[-1] == "wait"  # the step in flight, and none behind it
    num_waits = notes.count("wait")
    for _ in range(3):
        assert len(pair.overlapped.step()) > 1
    assert notes.count("wait") == num_waits
    pair.overlapped.step()
    assert notes.count("wait") == num_waits + 1  # it has ended


def sequence_of(tokenizer: Tokenizer, request: GenerationRequest) -> RunningSequence:
    return RunningSequence(request, tokenizer, 0.0)


def test_overlap_is_allowed_for_plain_requests_alone(tiny_tokenizer: Tokenizer) -> None:
    may = functools.partial(sequence_of, tiny_tokenizer)
    assert may_overlap(may(make_request(temperature=1.0, stop_token_ids=(1, 2), ignore_eos=False)))
    assert may_overlap(may(make_request(stop=("\n\nUser:",))))
    assert may_overlap(may(make_request(stop=("e",), keep_state=False)))
    assert not may_overlap(may(make_request(stop=("e",))))  # many tokens have that letter
    for change in ({"include_routing": True}, {"sampled_ids": (4,)}):
        assert not may_overlap(may(dataclasses.replace(make_request(), **change)))
    assert may_overlap(may(dataclasses.replace(make_request(), keep_states_at=(1,))))
    scored = may(make_request(prompt_logprobs=0))
    assert not may_overlap(scored)
    scored.append(5)  # its prompt has been read
    assert may_overlap(scored)
