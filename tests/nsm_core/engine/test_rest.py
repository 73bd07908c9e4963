"""An engine without requests gives the memory of its rows back."""

from __future__ import annotations

import pytest
import torch

from nsm_core.engine.rest import AFTER_S, Rest
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import StateSpec, TensorSpec

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
