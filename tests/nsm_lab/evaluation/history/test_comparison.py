from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nsm_lab.evaluation.history.__main__ import main
from nsm_lab.evaluation.history.estimates import mean_estimate
from nsm_lab.evaluation.history.fresh_starts import FreshStart, FreshStartResult
from nsm_lab.evaluation.history.key_tasks import KeyTask
from nsm_lab.evaluation.history.measure import HistoryResult, HistorySettings, measure_history
from nsm_lab.evaluation.history.stored import history_from_fields
from nsm_lab.evaluation.history.together import gains_together
from tests.nsm_lab.evaluation.history.memories import Memory, random_texts

SETTINGS = HistorySettings(
    starts=(50,), spans=(200,), repeat_distances=(300, 900), passages=1, key_contexts=(400,), key_distances=(20, 300)
)
TASKS = [KeyTask(needle=(3, 1, 2, 9, 8), question=(3, 1, 2), answers=tuple((9 + i, 8) for i in range(10)))]


def measured(span: int) -> HistoryResult:
    return measure_history(Memory(span), random_texts(3, 1700), TASKS, reach=span, settings=SETTINGS)


@pytest.fixture(scope="module")
def results() -> dict[str, HistoryResult]:
    return {"all": measured(8192), "window": measured(310)}


def test_stored_history_is_read_as_it_was(results: dict[str, HistoryResult]) -> None:
    for result in results.values():
        assert history_from_fields(json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_comparison_puts_models_side_by_side(
    results: dict[str, HistoryResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, result in results.items():
        (tmp_path / f"{label}.json").write_text(json.dumps({"history": dataclasses.asdict(result)}), "utf-8")
    paths = [str(tmp_path / f"{label}.json") for label in results]
    assert main([*paths, "--output", str(tmp_path / "both")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "both.md").read_text("utf-8") == text
    assert (tmp_path / "both.svg").read_text("utf-8").count("<svg") == 1
    assert "which reach so many tokens: all 8,192, window 310." in text
    (far,) = [line for line in text.splitlines() if line.startswith("| 900 |")]
    everything, window = far.strip("| ").split(" | ")[1:]
    assert "not found" not in everything
    assert "*" in window
    assert window.endswith("not found")
    assert text.count("| 400 | 300 | 100% (44% … 100%) | 100% (44% … 100%) |") == 2  # likeliest, and written


def test_comparison_names_a_report_without_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain.json").write_text('{"losses": {}}', "utf-8")
    assert main([str(tmp_path / "plain.json")]) == 1
    assert "plain.json is not the report of an evaluation with history" in capsys.readouterr().err
    assert main([str(tmp_path / "plain.json"), str(tmp_path / "plain.json")]) == 1
    assert "each of 2 reports needs a name of its own" in capsys.readouterr().err


def test_one_model_on_two_sets_of_documents_has_the_gain_of_all_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = random_texts(5, 1700)
    settings = HistorySettings(starts=(50,), spans=(200,), repeat_distances=(), key_contexts=())
    for label, part in {"first": texts[:2], "rest": texts[2:], "whole": texts}.items():
        result = measure_history(Memory(8192), part, TASKS, reach=8192, settings=settings)
        (tmp_path / f"{label}.json").write_text(json.dumps({"history": dataclasses.asdict(result)}), "utf-8")
    rows = []
    for labels in (("first", "rest"), ("whole",)):
        assert main([*(str(tmp_path / f"{label}.json") for label in labels), "--together"]) == 0
        rows.append(capsys.readouterr().out.splitlines()[-1])
    assert rows[0].startswith("| 50 | 5 | ")
    assert rows[0] == rows[1]


def test_gains_on_other_spans_are_not_put_together() -> None:
    estimate = mean_estimate([0.1, 0.2])
    results = [
        FreshStartResult(
            spans=spans,
            span_len=64,
            loss=estimate,
            starts=tuple(FreshStart(start=start, is_beyond_windows=True, gain=estimate) for start in (100, 300)),
        )
        for spans in ((200, 600), (600,))
    ]
    assert set(gains_together(results)) == {300}
