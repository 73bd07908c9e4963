"""The client that reads a server's sockets, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.http_gpu import Seen, figures_of, main


def test_figures_are_of_all_streams_and_pieces() -> None:
    seen = Seen(firsts=[0.1], gaps=[0.01], num_tokens=6, num_turns=1)
    seen.add(Seen(firsts=[0.3], gaps=[0.03], num_tokens=6, num_failed=1))
    figures = figures_of(seen, 2.0, 0.000024)
    assert figures["tokens_per_s"] == 6
    assert figures["turns_per_s"] == 0.5
    assert figures["tokens_per_piece"] == 3
    assert (figures["first_ms_p50"], figures["gap_ms_p99"]) == (pytest.approx(300), pytest.approx(30))
    assert (figures["cpu_us_per_token"], figures["num_failed"]) == (pytest.approx(2), 1)


def test_streams_and_turns_of_a_small_model_are_counted_whole(tiny_model_dir: Path) -> None:
    argv = ["--serve", f"--model {tiny_model_dir} --num-threads 1 --device cpu", "--streams", "3", "--tokens", "6"]
    argv += ["--sessions", "2", "--sessions-each", "1", "2", "--turns", "2", "--turn-tokens", "4", "--clients", "2"]
    argv += ["--beside", "2", "--beside-tokens", "6", "--prompts", "1", "--prompt-words", "10"]
    rows = main(argv)["rows"]
    assert [row["num_failed"] for row in rows] == [0] * 5
    streams, sessions, in_turns, alone, beside = rows
    assert streams["tokens_per_s"] > 0
    assert sessions["turns_per_s"] > 0
    assert (sessions["num_each"], in_turns["num_each"]) == (1, 2)
    assert alone["prompt_tokens_per_s"] == 0 < beside["prompt_tokens_per_s"]
