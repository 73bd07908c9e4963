"""Slices: the events of plain steps, fewer calls, and nobody waits for their end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, TokenEvent
from nsm_core.engine.slices import MAX_ROUNDS, SLICE_S
from nsm_core.execution.base import DecodeInputs
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_request, random_ids, run_all, run_one
from tests.nsm_core.execution.small_models import NATIVE, VOCABULARY, model_of, weights_of
from tests.support.counts import scaled

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")


class UntimedExecutor(NativeExecutor):
    """Its slices last as long as they may by everything but the time. `lengths`: their rounds."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.lengths: list[int] = []

    def decode_rounds(self, rows: Sequence[int], inputs: DecodeInputs, /) -> npt.NDArray[np.int64]:
        assert inputs.seconds == SLICE_S
        tokens = super().decode_rounds(
            rows,
            DecodeInputs(
                ids=inputs.ids,
                choices=inputs.choices,
                end_ids=inputs.end_ids,
                most_rounds=inputs.most_rounds,
                seconds=3600.0,
                interrupt=inputs.interrupt,
            ),
        )
        self.lengths.append(len(tokens))
        return tokens


class PlainExecutor(NativeExecutor):
    decode_rounds = None  # type: ignore[assignment]


class Sliced:
    """An engine, and the executor that it made."""

    def __init__(self, tokenizer: Tokenizer, kind: type[NativeExecutor], **config: object) -> None:
        self.made: list[NativeExecutor] = []

        def make(*arguments: object, **options: object) -> NativeExecutor:
            factory = functools.partial(kind, weights=weights_of("window", NATIVE[0]))
            self.made.append(factory(*arguments, **options))  # type: ignore[arg-type]
            return self.made[-1]

        limits = {"max_slots": 4, "token_budget": 32, "queue_limit": 64, "speculation": "off", **config}
        self.engine = Engine(
            model_of("window"),
            tokenizer,
            fingerprint=FINGERPRINT,
            config=EngineConfig(**limits),  # type: ignore[arg-type]
            executor=make,
            poison=True,
        )

    @property
    def lengths(self) -> list[int]:
        executor = self.made[0]
        assert isinstance(executor, UntimedExecutor)
        return executor.lengths


def visible(events: Sequence[Event]) -> list[Event]:
    """Without what differs in time."""
    return [event for event in events if not isinstance(event, Finished)] + [
        event for event in events if isinstance(event, Finished)
    ]


REQUEST = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "max_tokens": st.integers(1, 30),
        "temperature": st.sampled_from((0.0, 0.9)),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from(((), ("a",), ("th", "e "))),
        "repetition_penalty": st.sampled_from((1.0, 1.0, 1.0, 1.2)),
        "logprobs": st.sampled_from((None, None, None, 2)),
    }
)


@settings(max_examples=scaled(25, 600), deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=6),
    st.lists(st.integers(0, 30), max_size=6),
    st.sampled_from(("off", "lookup")),
    st.sets(st.integers(0, 5)),
)
def test_events_and_states_are_those_of_plain_steps(
    tiny_tokenizer: Tokenizer,
    given_requests: list[dict[str, object]],
    arrivals: list[int],
    speculation: str,
    behind: set[int],
) -> None:
    """Of requests in the background, numbered `behind`, too."""
    requests = []
    for number, fields in enumerate(given_requests):
        options = {name: value for name, value in fields.items() if name != "length"}
        prompt = random_ids(number, int(str(fields["length"])), VOCABULARY)
        made = make_request(str(number), prompt, seed=number, **options)  # type: ignore[arg-type]
        requests.append(dataclasses.replace(made, is_background=number in behind))
    plain = run_all(Sliced(tiny_tokenizer, PlainExecutor, speculation=speculation).engine, requests)
    sliced = Sliced(tiny_tokenizer, UntimedExecutor, speculation=speculation)
    found = run_all(sliced.engine, requests, arrivals=arrivals[: len(requests)])
    for request_id, outcome in plain.items():
        assert visible(found[request_id].events) == visible(outcome.events)


def test_a_request_alone_takes_few_calls(tiny_tokenizer: Tokenizer) -> None:
    sliced = Sliced(tiny_tokenizer, UntimedExecutor)
    run_one(sliced.engine, make_request("a", random_ids(0, 5, VOCABULARY), max_tokens=100))
    assert sliced.lengths == [MAX_ROUNDS, 99 - MAX_ROUNDS]
    assert sliced.engine.stats().num_steps == 100


def test_counters_are_those_of_plain_steps(tiny_tokenizer: Tokenizer) -> None:
    requests = [make_request(str(number), random_ids(number, 5, VOCABULARY), max_tokens=20) for number in range(3)]
    engines = [Sliced(tiny_tokenizer, kind).engine for kind in (PlainExecutor, UntimedExecutor)]
    counted = []
    for engine in engines:
        run_all(engine, requests)
        stats = engine.stats()
        counted.append((stats.num_steps, stats.step_rows, stats.step_tokens, stats.tokens_generated))
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    "other", [{"stop": ("a",)}, {"logprobs": 1}, {"repetition_penalty": 1.5}], ids=["stop", "logprobs", "penalty"]
)
def test_a_request_beside_one_that_needs_python_has_its_tokens(
    tiny_tokenizer: Tokenizer, other: dict[str, object]
) -> None:
    plain = make_request("plain", random_ids(0, 5, VOCABULARY), max_tokens=20)
    needing = make_request("needing", random_ids(1, 5, VOCABULARY), max_tokens=20, **other)  # type: ignore[arg-type]
    alone = run_one(Sliced(tiny_tokenizer, PlainExecutor).engine, plain)
    together = run_all(Sliced(tiny_tokenizer, UntimedExecutor).engine, [plain, needing])
    assert together["plain"].ids == alone.ids


def test_whoever_sets_the_interrupt_ends_the_slice(tiny_tokenizer: Tokenizer) -> None:
    sliced = Sliced(tiny_tokenizer, UntimedExecutor)
    sliced.engine.add(make_request("a", random_ids(0, 5, VOCABULARY), max_tokens=50))
    sliced.engine.step()
    sliced.engine.interrupt.set()
    sliced.engine.step()
    sliced.engine.interrupt.clear()
    sliced.engine.step()
    assert sliced.lengths == [1, 48]


async def test_a_request_that_comes_during_a_slice_does_not_wait_for_its_end(tiny_tokenizer: Tokenizer) -> None:
    """The first request would decode for ever in one slice of the kernels, were it not for the second."""

    class EndlessExecutor(NativeExecutor):
        def decode_rounds(self, rows: Sequence[int], inputs: DecodeInputs, /) -> npt.NDArray[np.int64]:
            tokens = [super().decode_rounds(rows, one_round(inputs))]
            while len(tokens) < inputs.most_rounds and not inputs.interrupt[0]:
                tokens.append(super().decode_rounds(rows, one_round(inputs, tokens)))
            return np.concatenate(tokens)

    def one_round(inputs: DecodeInputs, before: Sequence[npt.NDArray[np.int64]] = ()) -> DecodeInputs:
        choices = inputs.choices.copy()
        choices[:, 2] += len(before)
        ids = before[-1][0].astype(np.int32) if before else inputs.ids
        return DecodeInputs(
            ids=ids, choices=choices, end_ids=inputs.end_ids, most_rounds=1, seconds=0.0, interrupt=inputs.interrupt
        )

    engine = AsyncEngine(Sliced(tiny_tokenizer, EndlessExecutor).engine)
    await engine.start()
    first = engine.submit(endless("first"))
    events = first.events()
    await anext(events)
    second = engine.submit(make_request("second", random_ids(1, 5, VOCABULARY), max_tokens=3))
    assert [type(event) async for event in second.events()] == [TokenEvent] * 3 + [Finished]
    first.cancel()
    rest = [event async for event in events]
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason is FinishReason.ABORT
    await engine.stop()


def endless(name: str) -> GenerationRequest:
    return make_request(name, random_ids(0, 5, VOCABULARY), max_tokens=1_000_000)
