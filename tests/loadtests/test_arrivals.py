"""Traces, and the arrivals that are made of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from loadtests.arrivals import TRACES, TraceRow, plan_arrivals, read_trace, share_of
from loadtests.errors import RunError
from loadtests.run_profile import OpenLoop
from loadtests.steps import EXTRACTS, arrivals_of, steps_of


@pytest.mark.parametrize("name", sorted(EXTRACTS))
def test_the_extracts_are_read(name: str) -> None:
    rows = read_trace(TRACES / EXTRACTS[name])
    assert len(rows) == 2000
    assert all(before.at_s <= after.at_s for before, after in itertools.pairwise(rows))
    assert all(row.prompt_tokens > 0 and row.output_tokens > 0 for row in rows)


def test_a_row_of_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.5,374,44", "2023-11-16 18:15:50.75,396,1")
    path.write_text("\r\n".join(lines))
    assert read_trace(path) == [TraceRow(0.0, 374, 44, 0), TraceRow(4.25, 396, 1, 1)]


def test_a_request_of_mooncake_continues_the_one_whose_blocks_it_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    blocks = [[1, 2, 3], [7, 8], [1, 2, 4, 5], [1, 2, 4, 6], [7, 9]]
    row = '{{"timestamp": {}, "input_length": 9, "output_length": 1, "hash_ids": {}}}'
    path.write_text("\n".join(row.format(1000 * index, ids) for index, ids in enumerate(blocks)))
    assert [row.conversation for row in read_trace(path)] == [0, 1, 0, 0, 1]


def test_B4_each_step_has_its_rate_and_begins_at_its_time() -> None:
    rows = read_trace(TRACES / EXTRACTS["azure"])
    steps = [("slow", 2.0, 10.0), ("fast", 20.0, 5.0)]
    arrivals = plan_arrivals(rows, steps, length_scale=0.05, max_output=16, pause_s=3.0)
    slow, fast = ([arrival for arrival in arrivals if arrival.step == name] for name in ("slow", "fast"))
    assert (len(slow), len(fast)) == (20, 100)
    assert slow[-1].at_s == pytest.approx(19 / 2.0)
    assert (fast[0].at_s, fast[-1].at_s) == (13.0, pytest.approx(13.0 + 99 / 20.0))
    assert [arrival.number for arrival in arrivals] == list(range(120))


def test_lengths_are_scaled_and_bounded() -> None:
    rows = [TraceRow(0.0, 1000, 100, 0), TraceRow(1.0, 3, 3, 1), TraceRow(2.0, 4000, 900, 2)]
    arrivals = plan_arrivals(rows, [("", 1.0, 3.0)], length_scale=0.1, max_output=32)
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals] == [(100, 10), (1, 1), (400, 32)]


def test_a_trace_that_ends_begins_anew_without_a_gap_or_a_step_back() -> None:
    rows = [TraceRow(float(index), 10, 10, index % 2) for index in range(4)]
    arrivals = plan_arrivals(rows, [("", 1.0, 10.0)], length_scale=1.0, max_output=10)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(arrivals)]
    assert len(arrivals) == 10
    assert min(gaps) > 0
    assert [arrival.turn for arrival in arrivals if arrival.conversation == 1] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_share_whole_conversations(count: int) -> None:
    rows = read_trace(TRACES / EXTRACTS["mooncake"])
    arrivals = plan_arrivals(rows, [("", 10.0, 20.0)], length_scale=0.01, max_output=8)
    shares = [share_of(arrivals, index, count) for index in range(count)]
    assert sorted(arrival.number for share in shares for arrival in share) == list(range(len(arrivals)))
    conversations = [{arrival.conversation for arrival in share} for share in shares]
    assert not any(first & second for first, second in itertools.combinations(conversations, 2))


def test_rates_may_be_multiples_of_a_measured_capacity() -> None:
    loop = OpenLoop(rates=(0.5, 10.0, 0.5), unit="capacity", step_s=4.0)
    assert steps_of(loop, 3.0) == [("1: 0.5x", 1.5, 4.0), ("2: 10x", 30.0, 4.0), ("3: 0.5x", 1.5, 4.0)]
    with pytest.raises(RunError, match="capacity"):
        steps_of(loop, 0.0)


def test_every_process_plans_the_same() -> None:
    from loadtests.run_profile import load_profile

    profile = load_profile("curve")
    assert profile.open_loop is not None
    assert arrivals_of(profile, profile.open_loop, 4.0) == arrivals_of(profile, profile.open_loop, 4.0)
