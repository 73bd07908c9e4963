from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_lab.bench.result import FORMAT, BenchResult, Measure, collect, quantile, read_result
from tests.nsm_lab.bench.made_results import made_result

NAMES = st.sampled_from(["decode.1.tokens_per_s", "prefill.512.tokens_per_cpu_s", "session.8.resumed_ms"])
VALUES = st.lists(st.floats(min_value=0, max_value=1e12), min_size=1, max_size=6).map(tuple)


@given(name=NAMES, values=VALUES)
def test_a_result_comes_back_from_its_json_as_it_was(name: str, values: tuple[float, ...]) -> None:
    result = made_result(Measure(name, values))
    assert BenchResult.from_json(result.to_json()) == result


def test_the_json_tells_command_versions_machine_commit_and_units() -> None:
    fields = json.loads(made_result(Measure("decode.8.itl_p99_ms", (2.0, 1.0))).to_json())
    assert {"format", "kind", "command", "commit", "created", "machine", "versions", "subject", "options"} < set(fields)
    assert fields["format"] == FORMAT
    assert fields["measures"] == [{"name": "decode.8.itl_p99_ms", "unit": "ms", "better": "less", "values": [2.0, 1.0]}]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "nsm-bench/0"},
        {"measures": [{"name": "decode.8.itl_p99_ms", "values": []}]},
        {"measures": [{"name": "decode.8.itl_p99_ms", "values": [math.nan]}]},
        {"measures": [{"name": "decode.8.itl_p99_ms", "values": [-1.0]}]},
        {"measures": [{"name": "decode.8.colour", "values": [1.0]}]},
        {"measures": [{"name": "decode.itl_p99_ms", "values": [1.0]}]},
        {"measures": None},
        {"surprise": 1},
    ],
)
def test_what_is_no_result_is_refused_with_the_files_name(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**json.loads(made_result().to_json()), **change}), "utf-8")
    with pytest.raises(ConfigError, match=r"result\.json: "):
        read_result(file)


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"format": "nsm-bench/1"}'])
def test_a_file_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        BenchResult.from_json(text)


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1), st.floats(min_value=0, max_value=1))
def test_a_quantile_lies_among_the_values_and_rises_with_its_share(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= quantile(ordered, 0.0) <= quantile(ordered, share) + 1e-6
    assert quantile(ordered, share) <= quantile(ordered, 1.0) + 1e-6
    assert (quantile(ordered, 0.0), quantile(ordered, 1.0)) == (ordered[0], ordered[-1])


def test_measures_of_one_thing_and_size_stand_together() -> None:
    names = ["p.1.x_ms", "c.1.x_ms", "p.2.x_ms", "c.2.x_ms"]
    repeats = [dict.fromkeys(names, 1.0), dict.fromkeys([*names, "p.1.y_ms"], 1.0)]
    ordered = [measure.name for measure in collect(repeats)]
    assert ordered == ["p.1.x_ms", "p.1.y_ms", "p.2.x_ms", "c.1.x_ms", "c.2.x_ms"]


def test_repeats_become_measures_in_the_order_of_the_first() -> None:
    repeats = [{"a.1.x_ms": 1.0, "b.1.x_ms": 2.0}, {"b.1.x_ms": 4.0, "a.1.x_ms": 3.0}]
    assert collect(repeats) == (Measure("a.1.x_ms", (1.0, 3.0)), Measure("b.1.x_ms", (2.0, 4.0)))
