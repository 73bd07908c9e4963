"""From a file to a resumed session, at a size that takes a moment."""

from __future__ import annotations

from pathlib import Path

from benchmarks.rwkv7_serve import measure
from tests.support.rwkv7 import small_config


def test_a_session_goes_on_after_a_kill(tmp_path: Path) -> None:
    config = small_config(vocab_size=640, head_size=64, width=64)
    options = ["--num-threads", "1", "--max-slots", "2"]
    found = list(measure(config, "small", tmp_path, weight_format="int8", options=options, num_turns=2))
    assert [next(iter(row)) for row in found] == [
        *("written", "converted_to", "start", "turn", "turn", "served", "start", "turn", "served")
    ]
    assert found[1]["bytes"] < found[0]["bytes"]
    turns = [row for row in found if "turn" in row]
    assert [turn["version"] for turn in turns] == [1, 2, 3]
    assert turns[2]["prompt_tokens"] > turns[1]["prompt_tokens"] > 100
    assert all(row["peak_mb"] > 1 for row in found if "peak_mb" in row)
