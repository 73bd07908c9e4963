from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.tenants.rate_limit import TokenBucket
from tests.support.tenants import StillClock


def test_a_burst_then_the_rate() -> None:
    clock = StillClock()
    bucket = TokenBucket(clock)
    answers = [bucket.take(per_s=2.0, burst=3) for _ in range(4)]
    assert [answer.remaining for answer in answers] == [2, 1, 0, 0]
    assert [answer.retry_after_s for answer in answers] == [None, None, None, 0.5]
    assert (answers[3].limit, answers[3].reset_s) == (3, 1.5)
    clock.now += 0.5
    assert bucket.take(per_s=2.0, burst=3).retry_after_s is None
    assert bucket.take(per_s=2.0, burst=3).retry_after_s == 0.5


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    clock = StillClock()
    bucket = TokenBucket(clock)
    bucket.take(per_s=1.0, burst=2)
    clock.now += 1e6
    assert [bucket.take(per_s=1.0, burst=2).remaining for _ in range(3)] == [1, 0, 0]


def test_new_limits_hold_at_once() -> None:
    bucket = TokenBucket(StillClock())
    assert [bucket.take(per_s=1.0, burst=1).retry_after_s for _ in range(2)] == [None, 1.0]
    assert bucket.take(per_s=1.0, burst=2).retry_after_s is None
    assert bucket.take(per_s=4.0, burst=1).retry_after_s == 0.25  # what is missing is cut to the smaller bucket


@given(per_s=st.floats(0.01, 1000), burst=st.integers(1, 50), gaps=st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_never_more_than_burst_plus_rate_times_time(per_s: float, burst: int, gaps: list[float]) -> None:
    clock = StillClock()
    bucket = TokenBucket(clock)
    num_allowed = 0
    for gap in gaps:
        clock.now += gap
        answer = bucket.take(per_s=per_s, burst=burst)
        num_allowed += answer.retry_after_s is None
        assert num_allowed <= burst + per_s * clock.now + 1e-3
        assert 0 <= answer.remaining < burst + 1


@given(per_s=st.floats(0.01, 1000), burst=st.integers(1, 20), start=st.floats(0, 1e6))
def test_who_waits_as_long_as_told_is_let_in(per_s: float, burst: int, start: float) -> None:
    clock = StillClock(start)
    bucket = TokenBucket(clock)
    while (wait := bucket.take(per_s=per_s, burst=burst).retry_after_s) is None:
        pass
    clock.now += wait * (1 + 1e-6) + 1e-6
    assert bucket.take(per_s=per_s, burst=burst).retry_after_s is None
