"""The client of servers on a CPU, on a small model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.http_cpu import main


def test_servers_of_each_number_of_threads_are_asked_by_turns(tiny_model_dir: Path) -> None:
    argv = ["--threads", "1", "2", "--streams", "2", "--tokens", "4", "--words", "3", "--rounds", "1"]
    taken = main([*argv, "--serve", f"--model {tiny_model_dir} --device cpu"])["taken"]
    assert list(taken) == ["this, threads 1", "this, threads 2"]
    assert [rows[2][0]["num_failed"] for rows in taken.values()] == [0, 0]
