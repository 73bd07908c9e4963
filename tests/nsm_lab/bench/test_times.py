from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_lab.bench.times import RequestTimes, load_figures


def test_figures_of_two_requests() -> None:
    one = RequestTimes(started=10.0, pieces=[10.5, 10.6, 10.8], ended=11.0, num_tokens=6)
    other = RequestTimes(started=10.5, pieces=[11.5], ended=12.0, num_tokens=4)
    figures = load_figures("stream.2", [one, other], cpu_s=0.5)
    assert figures["stream.2.tokens_per_s"] == pytest.approx(5.0)
    assert figures["stream.2.tokens_per_cpu_s"] == pytest.approx(20.0)
    assert figures["stream.2.ttft_p50_ms"] == pytest.approx(750.0)
    assert figures["stream.2.itl_p99_ms"] == pytest.approx(199.0)
    assert figures["stream.2.e2e_p50_ms"] == pytest.approx(1250.0)


def test_B2_tokens_are_those_that_the_server_counts_not_pieces() -> None:
    times = RequestTimes(started=0.0, pieces=[1.0], ended=2.0, num_tokens=100)
    assert load_figures("stream.1", [times], cpu_s=None) == pytest.approx(
        {"stream.1.tokens_per_s": 50.0}
        | {f"stream.1.ttft_p{share}_ms": 1000.0 for share in (50, 90, 99)}
        | {f"stream.1.e2e_p{share}_ms": 2000.0 for share in (50, 90, 99)}
    )


def test_without_any_text_the_first_piece_is_the_end() -> None:
    assert RequestTimes(started=1.0, ended=3.0).ttft_s == 2.0


@given(st.lists(st.floats(min_value=0.001, max_value=100.0), min_size=2, max_size=50))
def test_gaps_join_to_the_time_between_first_and_last(gaps: list[float]) -> None:
    pieces = [sum(gaps[:end]) for end in range(len(gaps) + 1)]
    times = RequestTimes(started=0.0, pieces=pieces, ended=pieces[-1])
    assert sum(times.gaps_s) == pytest.approx(pieces[-1] - pieces[0])
