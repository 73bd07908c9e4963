"""`nsm eval --suite history` on the small bundled model, in counts that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsm_lab.evaluation.config import EvalConfig
from nsm_lab.evaluation.report import Report
from nsm_lab.evaluation.run import run_evaluation
from tests.support.samples import BOOKS_DIR


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history") / "small"


@pytest.fixture(scope="module")
def report(stem: Path) -> Report:
    config = EvalConfig(
        data=BOOKS_DIR,
        model=Path("pulse-books-small"),
        suite=("history",),
        split="test",
        device="cpu",
        history_starts=(512,),
        history_spans=(2048,),
        history_repeats=(300, 2100),
        history_passages=1,
        history_contexts=(1024,),
        history_distances=(64, 900),
        output=stem,
    )
    return run_evaluation(config)


def test_history_of_the_small_model_has_every_part_with_its_interval(report: Report) -> None:
    history = report.history
    assert history is not None
    assert (history.reach, history.num_documents) == (512, 3)
    assert history.fresh_starts is not None
    assert history.repeats is not None
    assert history.keys is not None
    near, far = history.repeats.distances
    assert (near.is_beyond_windows, far.is_beyond_windows) == (False, True)
    assert near.gain.mean > 0.1 > far.gain.mean  # what its windows hold it uses
    assert near.gain.exceeds(0.0)
    assert 2.0 < history.fresh_starts.loss.mean < 6.0
    for estimate in (near.gain, far.gain, history.fresh_starts.starts[0].gain, history.fresh_starts.loss):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.mean < estimate.high
        assert len(estimate.per_document) == 3
    assert [(cell.context, cell.distance, cell.is_beyond_windows) for cell in history.keys.cells] == [
        (1024, 64, False),
        (1024, 900, True),
    ]


def test_history_report_marks_what_is_beyond_the_windows_and_what_was_not_found(report: Report, stem: Path) -> None:
    text = stem.with_suffix(".md").read_text("utf-8")
    assert "The attention layers together reach 512 tokens back." in text
    assert "| 2,100 * | 3 |" in text
    (far_key,) = [line for line in text.splitlines() if line.startswith("| 1K | 900 * |")]
    assert far_key.endswith("| not found |")
    stored = json.loads(stem.with_suffix(".json").read_text("utf-8"))
    assert stored["history"]["repeats"]["distances"][0]["gain"]["mean"] == report.history.repeats.distances[0].gain.mean
    assert stored["settings"]["history_repeats"] == [300, 2100]


def test_history_curves_are_a_picture(stem: Path, report: Report) -> None:
    picture = stem.with_suffix(".svg").read_text("utf-8")
    assert picture.count("<svg") == 1
    for title in ("text: gain over a fresh start", "a passage read before: gain", "key: likeliest of ten"):
        assert picture.count(f">{title}<") == 1
