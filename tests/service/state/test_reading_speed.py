"""The reading speed that the snapshots' limit follows."""

from __future__ import annotations

import pytest

from nsm_core.engine.request import Finished, FinishReason, Timings
from service.state.reading_speed import ReadingSpeed


def reading(num_tokens: int, seconds: float | None, *, num_cached: int = 0, num_sampled: int = 0) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH,
        prompt_tokens=num_cached + num_tokens,
        cached_tokens=num_cached,
        completion_tokens=num_sampled,
        timings=Timings(queue_s=1.0, prefill_s=seconds, decode_s=2.0),
    )


def test_the_first_reading_takes_the_place_of_the_guess_and_later_ones_move_it() -> None:
    speed = ReadingSpeed(2_000.0)
    speed.observe(reading(1_000, 1.0, num_cached=500))
    assert speed.tokens_per_s == 1_000.0
    speed.observe(reading(200, 0.1))
    assert speed.tokens_per_s == pytest.approx(1_200.0)


@pytest.mark.parametrize("finished", [reading(63, 1.0), reading(100, None), reading(100, 0.0)])
def test_what_read_little_tells_nothing(finished: Finished) -> None:
    speed = ReadingSpeed(2_000.0)
    speed.observe(finished)
    assert speed.tokens_per_s == 2_000.0


def test_tokens_that_are_read_one_by_one_take_as_long_as_sampled_ones() -> None:
    speed = ReadingSpeed(2_000.0, is_single=True)
    speed.observe(reading(1_000, 1.0, num_sampled=100))
    assert speed.tokens_per_s == 50.0
