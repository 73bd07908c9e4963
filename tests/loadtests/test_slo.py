"""Objectives: what a file may say, and what a run has missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.errors import RunError
from loadtests.resources import Reading, ResourceUse
from loadtests.run_profile import PROFILES, load_profile
from loadtests.samples import Sample
from loadtests.slo import SLOS, Slo, judge, load_slo
from tests.loadtests.test_samples import make_sample


def missed(fields: dict[str, Any], samples: list[Sample]) -> list[str]:
    """What of one objective was missed."""
    verdicts = judge(Slo.model_validate({"objective": [fields]}), samples)
    return [verdict.what for verdict in verdicts if not verdict.is_met]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_is_valid_and_has_objectives(path: Path) -> None:
    assert load_profile(path.stem).name == path.stem
    assert load_slo(path.stem).objective


@pytest.mark.parametrize("path", sorted(SLOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_of_objectives_is_valid(path: Path) -> None:
    assert load_slo(path).objective


@pytest.mark.parametrize(
    "text",
    [
        "[[objective]]\nttft_msec = { p50 = 1 }",
        "[[objective]]\nttft_ms = { p0 = 1 }",
        "[[objective]]\nttft_ms = { median = 1 }",
        "[[objective]]\nttft_ms = { p99 = -1 }",
        "[[objective]]\nmax_failed_share = 2",
        "[service]\nmax_rss = 5",
        "[objectives]\n",
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text)
    with pytest.raises(RunError):
        load_slo(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_ms": {"p50": 20}, "e2e_ms": {"p99.9": 120}},
        {"tokens_per_s": {"p10": 50}},
        {"max_failed_share": 0, "max_rejected_share": 0},
        {"min_goodput": 1, "goodput_ttft_ms": 20, "goodput_e2e_ms": 120},
        {"min_output_tokens_per_s": 40},
    ],
)
def test_what_is_just_within_is_met(fields: dict[str, Any]) -> None:
    assert missed(fields, [make_sample()]) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"ttft_ms": {"p50": 19.9}}, "ttft_ms p50"),
        ({"itl_ms": {"p99": 4.9}}, "itl_ms p99"),
        ({"e2e_ms": {"p100": 119}}, "e2e_ms p100"),
        ({"tokens_per_s": {"p10": 50.1}}, "tokens_per_s p10"),
        ({"min_requests": 2}, "requests"),
        ({"min_rejected": 1}, "refusals"),
        ({"min_goodput": 1, "goodput_ttft_ms": 19}, "goodput, requests/s"),
        ({"min_resumed_share": 0.5}, "share of resumed tokens"),
        ({"rejection_ms": {"p50": 5}}, "rejection_ms p50"),  # nothing measured is a miss
        ({"scenario": "session"}, "requests"),  # and so is a scenario that did not run
    ],
)
def test_what_is_just_beyond_is_missed(fields: dict[str, Any], what: str) -> None:
    assert missed(fields, [make_sample(itl_ms=[5.0])]) == [what]


@pytest.mark.parametrize(
    ("outcome", "what"),
    [("wrong", "wrong answers"), ("failed", "share of failures"), ("unfinished", "share of failures")],
)
def test_one_bad_answer_is_enough(outcome: str, what: str) -> None:
    samples = [make_sample() for _ in range(999)] + [make_sample(outcome=outcome)]
    assert missed({"max_failed_share": 0}, samples) == [what]


def test_a_refusal_must_say_when_to_come_back() -> None:
    refusal = make_sample(outcome="rejected", status=503, retry_after_s=1.0)
    assert missed({}, [refusal]) == []
    refusal.retry_after_s = None
    assert missed({}, [refusal]) == ["refusals without Retry-After"]


def test_an_objective_holds_for_the_scenarios_and_steps_that_fit() -> None:
    samples = [make_sample(step="1: 1x"), make_sample(step="2: 10x", ttft_ms=500.0)]
    limit = {"ttft_ms": {"p99": 100}}
    assert missed({**limit, "step": "1: *"}, samples) == []
    assert missed({**limit, "step": "2: *"}, samples) == ["ttft_ms p99"]
    assert missed({**limit, "scenario": "ch*"}, samples) == ["ttft_ms p99"]


def use_of(values: list[float]) -> ResourceUse:
    readings = [
        Reading(at_s=float(n), rss_mb=value, fds=10, connections=3, threads=4) for n, value in enumerate(values)
    ]
    return ResourceUse("server", readings)


def test_growth_leaves_out_the_warm_up_and_a_single_peak() -> None:
    assert use_of([100, 200, 300, 301, 301, 900, 302, 303, 302, 303, 303, 303]).growth("rss_mb") == 2.0
    assert use_of([300.0] * 7).growth("rss_mb") is None
    assert use_of([300, 420, 310]).rss_rise_mb == 120
    assert use_of([300, 420, 310]).left("rss_mb") == 10


def test_a_server_that_grows_misses_its_objective() -> None:
    slo = Slo.model_validate({"service": {"max_rss_growth_mb": 50, "max_fd_growth": 0, "max_rss_mb": 500}})
    leaking = use_of([300.0 + 20 * n for n in range(16)])
    assert [verdict.what for verdict in judge(slo, [], [leaking]) if not verdict.is_met] == [
        "largest RSS, MB",
        "growth of RSS, MB",
    ]
    assert all(verdict.is_met for verdict in judge(slo, [], [use_of([300.0] * 16)]))
