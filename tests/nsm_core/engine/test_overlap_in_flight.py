"""What happens to a step in flight: faults, deadlines, ends, counts and energy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import MAX_FAILURES_IN_A_ROW, Engine
from nsm_core.engine.request import Finished, FinishReason, TokenEvent, joules_of
from nsm_core.errors import DeadlineExceeded, StepFailed
from nsm_core.model.observer import ModelObserver
from nsm_core.sampling.device import PendingTokens
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FINGERPRINT,
    FakeOverlap,
    Outcome,
    ScriptedModel,
    make_request,
    overlapped,
    random_ids,
    run_one,
    small_model,
)
from tests.nsm_core.engine.overlap_pairs import Pair
from tests.support.fake_meters import FakeClock, FakeMeter


class Faulty:
    """An overlapped engine whose next launches or waits fail."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        self.num_launches = self.num_waits = 0  # that fail
        self.pair = Pair(ScriptedModel(list(range(100, 140)), vocab_size=512), tokenizer, **limits)
        self.engine = self.pair.overlapped
        self.pool = self.pair.made[0].pool
        step, wait = FakeOverlap.step, PendingTokens.wait

        def failing_step(fake: FakeOverlap, rows: Sequence[int], next_inputs: Any) -> Tensor:
            self.num_launches -= 1
            hidden = step(fake, rows, next_inputs)  # the rows are changed
            return self.fail() if self.num_launches >= 0 else hidden

        def failing_wait(tokens: PendingTokens) -> list[int]:
            self.num_waits -= 1
            return self.fail() if self.num_waits >= 0 else wait(tokens)

        monkeypatch.setattr(FakeOverlap, "step", failing_step)
        monkeypatch.setattr(PendingTokens, "wait", failing_wait)

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


def test_failed_launch_leaves_the_step_in_flight_intact(faulty: Faulty) -> None:
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
    pair.overlapped.add(make_request("late", deadline=10.0, max_tokens=100))
    pair.overlapped.step()
    now = 10.0
    ((_, end),) = pair.overlapped.step()
    assert isinstance(end, Finished)
    assert isinstance(end.error, DeadlineExceeded)
    assert end.completion_tokens == 1
    for name in "abc":
        pair.overlapped.add(make_request(name))
    pair.overlapped.step()
    assert sorted(name for name, _ in pair.overlapped.abort_all()) == ["a", "b", "c"]
    assert not pair.overlapped.has_work
    assert pair.overlapped.step() == []
    assert pair.made[0].pool.num_leased == 0


def test_steps_tokens_and_rows_are_counted_as_in_plain_steps(tiny_tokenizer: Tokenizer) -> None:
    """One ends by a stop id, while it takes part in the step behind: nothing is counted twice, or for nobody."""
    model = ScriptedModel(list(range(100, 140)), vocab_size=512)
    pair = Pair(model, tiny_tokenizer)
    pair.compare([make_request("a", max_tokens=9), make_request("b", max_tokens=9, stop_token_ids=(103,))])
    plain, got = pair.plain.stats(), pair.overlapped.stats()
    assert dataclasses.replace(got, step_seconds=0.0) == dataclasses.replace(plain, step_seconds=0.0)
    assert got.step_seconds > 0


class WorkingMeter(FakeMeter):
    """A joule for each reading."""

    def read(self) -> tuple[object, ...]:  # type: ignore[override]
        self.joules += 1.0
        return super().read()


def engine_with(tokenizer: Tokenizer, **parts: Any) -> Engine:
    config = EngineConfig(max_slots=2, token_budget=64)
    return Engine(small_model(), tokenizer, fingerprint=FINGERPRINT, config=config, executor=overlapped(), **parts)


def test_M6_requests_are_charged_for_their_own_tokens_alone(tiny_tokenizer: Tokenizer) -> None:
    engine = engine_with(tiny_tokenizer, meter=WorkingMeter())
    results = {name: Outcome() for name in "abcd"}
    for name in "abcd":
        engine.add(make_request(name, random_ids(1, 30), max_tokens=6, stop=()))
    for number in range(100):
        if number == 2:
            engine.cancel("b")
        for name, event in engine.step():
            results[name].events.append(event)
        if not engine.has_work:
            break
    charged = joules_of(outcome.finished for outcome in results.values())
    stats = engine.stats()
    assert all(outcome.finished.energy[0].joules > 0 for outcome in results.values())
    assert charged == pytest.approx(sum(use.joules for use in stats.request_energy), rel=1e-9)
    assert charged == pytest.approx(stats.energy[0].joules - 2, abs=1)


def test_model_is_sampled_between_steps(tiny_tokenizer: Tokenizer) -> None:
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
