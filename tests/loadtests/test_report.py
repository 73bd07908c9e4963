"""The report of a run, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from loadtests.conclusion import SAMPLES, conclude
from loadtests.resources import Reading, ResourceUse
from loadtests.run_end import RunEnd
from loadtests.samples import Sample
from loadtests.slo import Slo
from tests.loadtests.test_samples import make_sample

PNG = b"\x89PNG\r\n"


def make_run() -> list[Sample]:
    """Two steps of an open loop, and a chat with a wrong answer."""
    steps = [("1: 1x", 1.0, 20.0), ("2: 10x", 0.1, 200.0)]
    loop = [
        make_sample(scenario="arrival", step=step, intended_s=100.0 + n * gap, ttft_ms=ttft + n, itl_ms=[3.0, 5.0])
        for step, gap, ttft in steps
        for n in range(20)
    ]
    refused = make_sample(scenario="arrival", step="2: 10x", outcome="rejected", ttft_ms=None, retry_after_s=1.0)
    wrong = make_sample(outcome="wrong", problem="expected '<b>', got 'c'")
    return [*loop, refused, wrong]


def write_run(directory: Path) -> None:
    (directory / SAMPLES).write_text("".join(f"{sample.to_json()}\n" for sample in make_run()))
    RunEnd(planned_s=30.0, ran_s=30.0, arrivals={"1: 1x": 20, "2: 10x": 21}).write(directory)


def test_a_report_holds_figures_objectives_pictures_and_problems(tmp_path: Path) -> None:
    write_run(tmp_path)
    slo = Slo.model_validate({"objective": [{"scenario": "arrival", "ttft_ms": {"p99": 250}}]})
    readings = [Reading(at_s=float(n), rss_mb=300.0, fds=9, connections=2, threads=3) for n in range(9)]
    assert conclude(tmp_path, slo, [ResourceUse("server 0", readings)], {"profile": "none"}) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["latency-load.png", "latency.png", "resources.png", "throughput.png"]
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in pictures)
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 4
    assert "every objective met" in page
    assert "expected &#x27;&lt;b&gt;&#x27;, got" in page  # escaped: texts are anybody's
    assert "http" not in page  # nothing is loaded from anywhere
    figures = json.loads((tmp_path / "summary.json").read_text())["figures"]
    assert figures["arrival 2: 10x"]["rejected"] == 1


def test_a_missed_objective_makes_the_exit_code_1(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert conclude(tmp_path, Slo.model_validate({"objective": [{}]})) == 1  # one text was wrong
    assert "objectives missed" in (tmp_path / "report.html").read_text("utf-8")
