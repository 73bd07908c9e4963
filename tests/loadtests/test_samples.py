"""Figures made of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.samples import Sample, by_group, percentile, read_samples, summary, values_of


def make_sample(**fields: Any) -> Sample:
    defaults = {"scenario": "chat", "intended_s": 100.0, "outcome": "ok", "ttft_ms": 20.0, "e2e_ms": 120.0, "tokens": 6}
    return Sample(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, 1.0), (0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (0.99, 10.0), (1.0, 10.0)]
)
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None


def test_B2_speed_counts_tokens_not_pieces_of_text() -> None:
    assert make_sample(itl_ms=[50.0, 50.0]).tokens_per_s == 50.0  # five gaps between six tokens in 100 ms
    assert make_sample(tokens=1).tokens_per_s is None
    assert make_sample(ttft_ms=None).tokens_per_s is None


def test_a_sample_survives_the_file(tmp_path: Path) -> None:
    samples = [make_sample(itl_ms=[1.5, 2.5], step="1: 2/s"), make_sample(outcome="rejected", ttft_ms=None)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{sample.to_json()}\n" for sample in samples))
    assert read_samples(path) == samples


def test_a_summary_counts_everything_and_times_what_was_right() -> None:
    samples = [
        make_sample(prompt_tokens=30, resumed_tokens=20),
        make_sample(intended_s=101.0, e2e_ms=1000.0, ttft_ms=500.0),
        make_sample(outcome="wrong", ttft_ms=9000.0),
        make_sample(outcome="rejected", ttft_ms=None, e2e_ms=1.0, tokens=0),
    ]
    figures = summary(samples)
    assert (figures["requests"], figures["ok"], figures["wrong"], figures["rejected"]) == (4, 2, 1, 1)
    assert figures["ttft_ms"]["p99"] == 500.0
    assert (figures["resumed_tokens"], figures["computed_tokens"]) == (20, 10)
    assert figures["requests_per_s"] == pytest.approx(2 / 2.0)  # from 100 to 102 s


def test_groups_come_in_the_order_of_their_first_request() -> None:
    samples = [make_sample(step="2: 9x", intended_s=2.0), make_sample(step="1: 1x", intended_s=1.0)]
    assert list(by_group(samples)) == [("chat", "1: 1x"), ("chat", "2: 9x")]
    assert values_of(samples, "ttft_ms") == [20.0, 20.0]
