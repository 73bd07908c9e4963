"""The cost of a start, measured on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start_cost import COLUMNS, LOAD_COLUMNS, main
from nsm_core.errors import NsmError


def test_a_start_is_measured_in_a_process_of_its_own(tiny_model_dir: Path) -> None:
    options = ["--rounds", "1", "--idle", "0", "--load", "2", "--serve", f"--model {tiny_model_dir} --device cpu"]
    (row,) = main(options)["taken"]["this"]
    assert sorted(row) == sorted((*COLUMNS, *LOAD_COLUMNS))
    assert all(value > 0 for value in row.values())
    assert row["peak_mb"] >= row["started_mb"]


def test_a_server_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(NsmError, match=r"(?s)did not start: .*no model .*nowhere: expected"):
        main(["--rounds", "1", "--idle", "0", "--serve", f"--model {tmp_path / 'nowhere'}"])
