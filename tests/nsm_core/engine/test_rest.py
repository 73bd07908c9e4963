"""An engine without requests prepares what its start has left, and gives the memory of its rows back."""

from __future__ import annotations

import pytest
import torch

from nsm_core.engine.engine import Engine
from nsm_core.engine.rest import AFTER_S, PREPARE_AFTER_S, Rest
from nsm_core.execution.base import SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import StateSpec, TensorSpec
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_engine, make_request, small_model

SPEC = StateSpec((TensorSpec("slots", (1 << 18,), torch.float32),))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def used_pool() -> StatePool:
    pool = StatePool(SPEC, 2)
    pool.lease(0)
    pool.write(0, {"slots": torch.ones(1, 1 << 18)})
    pool.free(0)
    return pool


def is_given_back(pool: StatePool) -> bool:
    """Memory that the system took is zero when it comes again."""
    return not pool.tensors["slots"].any()


def test_memory_goes_back_when_no_request_has_run_for_a_while() -> None:
    pool, clock = used_pool(), Clock()
    rest = Rest(pool, clock)
    rest.used()
    rest.turn(has_work=True)
    for clock.now in (1.0, AFTER_S):
        rest.turn(has_work=False)
        assert not is_given_back(pool)
    clock.now = 1.0 + AFTER_S
    rest.turn(has_work=False)
    assert is_given_back(pool)


def test_a_request_that_comes_before_begins_the_time_again() -> None:
    pool, clock = used_pool(), Clock()
    rest = Rest(pool, clock)
    rest.used()
    rest.turn(has_work=False)
    clock.now = AFTER_S - 1.0
    rest.used()
    rest.turn(has_work=False)
    clock.now = AFTER_S + 1.0
    rest.turn(has_work=False)
    assert not is_given_back(pool)


def test_code_goes_once_in_each_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    clock = Clock()
    monkeypatch.setattr("nsm_core.engine.rest.give_back_code", lambda: given.append(clock.now))
    rest = Rest(used_pool(), clock)
    for clock.now in (0.0, AFTER_S, 2 * AFTER_S):
        rest.turn(has_work=False)
    assert given == [AFTER_S]
    rest.used()
    for clock.now in (3 * AFTER_S, 4 * AFTER_S, 5 * AFTER_S):
        rest.turn(has_work=False)
    assert given == [AFTER_S, 4 * AFTER_S]


def test_nothing_goes_while_a_row_is_leased() -> None:
    pool, clock = used_pool(), Clock()
    rest = Rest(pool, clock)
    pool.lease(1)
    rest.used()
    rest.turn(has_work=False)
    clock.now = AFTER_S
    rest.turn(has_work=False)
    assert not is_given_back(pool)


class Unprepared(EagerExecutor):
    """Its start has left `num_left` things, or one that raises `error`."""

    num_left = 3
    error: Exception | None = None

    def prepare_more(self) -> bool:  # type: ignore[override]  # here it is not None
        if self.error is not None:
            raise self.error
        self.num_left -= 1
        return self.num_left > 0


def engine_of(tokenizer: Tokenizer, clock: Clock, error: Exception | None = None) -> tuple[Engine, list[Unprepared]]:
    made: list[Unprepared] = []

    def make(model: SequenceModel, *, num_rows: int, poison: bool) -> Unprepared:
        made.append(Unprepared(model, num_rows=num_rows, poison=poison))
        made[0].error = error
        return made[0]

    return make_engine(small_model(), tokenizer, executor=make, clock=clock), made


def test_an_idle_engine_prepares_what_its_start_has_left_and_a_busy_one_does_not(tiny_tokenizer: Tokenizer) -> None:
    clock = Clock()
    engine, (executor,) = engine_of(tiny_tokenizer, clock)
    engine.add(make_request())
    while engine.has_work:
        clock.now += PREPARE_AFTER_S
        engine.rest()
        assert executor.num_left == 3
        engine.step()
    engine.rest()
    assert engine.rest_due_s(60.0) == pytest.approx(PREPARE_AFTER_S)
    assert (engine.rest_due_s(0.01), executor.num_left) == (0.01, 3)
    clock.now += 2 * PREPARE_AFTER_S
    for num_left in (2, 1, 0):
        assert engine.rest_due_s(60.0) == 0.0
        engine.rest()
        assert executor.num_left == num_left
    engine.rest()
    assert (engine.rest_due_s(60.0), executor.num_left) == (60.0, 0)


def test_what_cannot_be_prepared_ahead_is_left_to_its_use_unless_the_device_is_lost(
    tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    engine, _ = engine_of(tiny_tokenizer, clock, torch.OutOfMemoryError("no room"))
    engine.rest()
    clock.now += 2 * PREPARE_AFTER_S
    engine.rest()
    assert engine.rest_due_s(60.0) == 60.0
    assert caplog.messages == ["the engine prepares nothing more ahead: OutOfMemoryError: no room"]
    engine, _ = engine_of(tiny_tokenizer, clock, RuntimeError("CUDA error: an illegal memory access"))
    engine.rest()
    clock.now += 2 * PREPARE_AFTER_S
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.rest()
