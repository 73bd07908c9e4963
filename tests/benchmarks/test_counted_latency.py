"""The metrics beside what clients see, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import counted_latency
from benchmarks.http_gpu import served


def test_X27_the_metrics_share_of_the_wait_is_told_for_each_number_of_streams(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", str(tiny_model_dir), "--device", "cpu"]
    monkeypatch.setattr(counted_latency, "served", lambda given: served([*given, *options]))
    rows = counted_latency.main(["--streams", "1", "4", "--tokens", "4", "--words", "3", "--rounds", "1"])["rows"]
    assert [row["streams"] for row in rows] == [1, 4]
    assert all(row["first"] > 0 for row in rows)
