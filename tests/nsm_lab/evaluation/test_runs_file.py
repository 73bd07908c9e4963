from __future__ import annotations

from pathlib import Path

import pytest

from nsm_lab.evaluation.runs_file import RunsFile


def test_a_result_is_found_again_by_all_settings_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    RunsFile(path).add({"layer": "K", "lengths": (1, 2)}, {"loss": 0.5})
    runs = RunsFile(path)
    assert runs.find({"lengths": (1, 2), "layer": "K"}) == {"run": {"layer": "K", "lengths": [1, 2]}, "loss": 0.5}
    assert runs.find({"layer": "K"}) is None
    assert runs.find({"layer": "K", "lengths": (1, 3)}) is None


def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    RunsFile(path).add({"seed": 0}, {"loss": 0.5})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"run": {"seed": 1}, "lo')
    runs = RunsFile(path)
    assert len(runs.results) == 1
    runs.add({"seed": 1}, {"loss": 0.25})
    assert [result["loss"] for result in RunsFile(path).results] == [0.5, 0.25]


def test_another_line_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("nonsense\n{}\n", "utf-8")
    with pytest.raises(ValueError, match="Expecting value"):
        RunsFile(path)
