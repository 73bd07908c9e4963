from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.service.cli.conftest import Nsm, assert_one_line
from tests.support.tuning import file_of, pairs


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    file = tmp_path / "examples.jsonl"
    file.write_bytes(pairs(10))
    return file


def test_state_is_trained_stored_and_written(nsm: Nsm, examples: Path, tmp_path: Path) -> None:
    fields = ("tune", examples, "--name", "yes", "--rate", 0.1, "--epochs", 2, "--batch", 4)
    made = nsm(*fields)
    assert made.stdout.startswith("made yes@1: held-out loss ")
    lines = made.stderr.splitlines()
    assert lines[0] == "9 examples, 1 held out, 6 steps on cpu"
    assert lines[1].startswith("step 0 of 6: held out ")
    assert lines[-1].startswith("step 6 of 6: training ")
    (state,) = json.loads(nsm("states", "list", "--json").stdout)
    assert (state["id"], state["source"], state["position"]) == ("yes@1", "tuned", 1)
    file = tmp_path / "yes.nsm-state"
    assert nsm(*fields, "--out", file).stdout == made.stdout.replace("yes@1", "yes.nsm-state")
    assert nsm("states", "import", "copy", file).stdout == "made copy@1: 1 tokens\n"


def test_faults_are_one_line(nsm: Nsm, examples: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_bytes(file_of({"prompt": "a", "completion": "b"}, {"prompt": 1, "completion": "b"}))
    assert_one_line(nsm("tune", wrong, "--name", "x"), "line 2: prompt must be a string, got 1")
    assert_one_line(nsm("tune", tmp_path / "none", "--name", "x"), f"{tmp_path / 'none'}: No such file or directory")
    for rate in ("nan", "inf"):
        words = f"rate must be a finite number above 0, got {rate}"
        assert_one_line(nsm("tune", examples, "--name", "x", "--rate", rate), words)
    nsm("states", "create", "rules", "--text", "Once", "--published")
    words = "the operator has published a state 'rules': choose another name"
    assert_one_line(nsm("tune", examples, "--name", "rules"), words)
