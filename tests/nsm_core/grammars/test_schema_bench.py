"""The script that samples public schemas, on a few of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsm_core.tokenizer import Tokenizer
from tests.support.schema_bench import Bench, main, sample
from tests.support.schemas import POINT, TREE

FILES: dict[str, Any] = {
    "easy/point.json": {
        "schema": POINT,
        "tests": [
            {"data": {"x": 3, "y": None}, "valid": True},
            {"data": {"x": -9, "y": True}, "valid": True},
            {"data": {"x": 30, "y": None}, "valid": False},
            {"data": {"x": 3}, "valid": False},
        ],
    },
    "easy/tree.json": TREE,
    "hard/refused.json": {"schema": {"not": {"type": "string"}}, "tests": [{"data": 1, "valid": True}]},
    "hard/list.json": [1, 2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, value in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return tmp_path


def test_schemas_instances_and_answers_are_counted(folder: Path, tiny_tokenizer: Tokenizer) -> None:
    bench = Bench(tiny_tokenizer, num_answers=2)
    for one in sample(folder, count=10, seed=1):
        bench.add(one)
    counts = bench.counts
    assert (counts["schemas"], counts["taken"], counts["refused"]) == (3, 2, 1)
    assert (counts["valid instances"], counts["valid instances taken"]) == (2, 2)
    assert (counts["invalid instances"], counts["invalid instances refused"]) == (2, 2)
    assert (counts["answers"], counts["answers that ended and are valid"]) == (4, 4)
    assert counts["taken by the library alone"] == 2
    assert bench.odd == []
    assert [reason for reason in bench.reasons if "not" in reason]


def test_a_sample_is_chosen_by_its_seed(folder: Path) -> None:
    first, again, other = [[one.name for one in sample(folder, count=1, seed=seed)] for seed in (1, 1, 4)]
    assert first == again
    assert len(other) <= 1
    assert {one.name for one in sample(folder, count=4, seed=1)} == {
        "easy/point.json",
        "easy/tree.json",
        "hard/refused.json",
    }


def test_the_counts_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--count", "10", "--answers", "0"]) == 0
    assert "      2  taken\n" in capsys.readouterr().out
