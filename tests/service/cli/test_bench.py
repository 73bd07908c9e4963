"""`nsm bench` for real, with counts that are as small as they get."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsm_lab.bench import builds
from nsm_lab.bench.gate import CPU_MEASURES, rounds_needed
from nsm_lab.bench.result import BenchResult, Measure, read_result
from tests.nsm_lab.bench.made_results import made_result
from tests.nsm_lab.bench.test_builds import stand_in
from tests.service.cli.conftest import Nsm, assert_one_line

SMALL = ("--batches", "2,1", "--lengths", "20,30", "--tokens", "3", "--repeats", "2")


def test_an_engine_is_measured_to_table_file_and_pictures(nsm: Nsm, tmp_path: Path) -> None:
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    done = nsm("bench", "engine", *SMALL, "--output", file, "--plots", plots)
    assert done.exit_code == 0, done.output
    result = read_result(file)
    assert (result.kind, result.subject["model"], result.options["batches"]) == ("engine", "tiny", [1, 2])
    assert {"python", "torch"} < set(result.versions)
    assert {"cpu", "num_cpus", "memory_mb", "system", "load"} == set(result.machine)
    for name, measure in result.by_name().items():
        assert name in done.stdout
        assert len(measure.values) == (1 if name.startswith("memory.") else 2)
        # a tiny model may take less than what its loading gave back
        assert measure.median > 0 or name in {"memory.process.model_mb", "memory.process.ratio"}
    assert {name.split(".")[0] for name in result.by_name()} == {"decode", "prefill", "session", "memory"}
    pictures = {picture.name for picture in plots.iterdir()}
    assert {"decode-tokens_per_cpu_s.svg", "prefill-tokens_per_s.svg", "session-resumed_ms.svg"} <= pictures
    for picture in plots.iterdir():
        ElementTree.parse(picture)


def test_json_is_the_result_itself(nsm: Nsm) -> None:
    done = nsm("bench", "engine", "--batches", 1, "--lengths", 20, "--tokens", 2, "--repeats", 1, "--json")
    assert BenchResult.from_json(done.stdout).kind == "engine"


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--batches", "1,x"), "--batches"), (("--lengths", "0"), "--lengths"), (("--batches", ""), "--batches")],
)
def test_sizes_that_are_none_are_refused(nsm: Nsm, options: tuple[str, ...], message: str) -> None:
    done = nsm("bench", "engine", *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_more_requests_at_once_than_memory_holds_are_refused_by_option(nsm: Nsm) -> None:
    done = nsm("bench", "engine", "--batches", 10**14, "--lengths", 20, "--tokens", 2, "--repeats", 1)
    assert done.exit_code == 2
    assert f"Invalid value for '--batches': no memory for the states of {10**14} slots" in done.stderr


def test_a_server_that_is_not_there_is_one_line(nsm: Nsm) -> None:
    done = nsm("bench", "http", "--url", "http://127.0.0.1:1", "--repeats", 1)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1


def test_two_results_are_compared(nsm: Nsm, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(made_result(Measure("decode.1.tokens_per_s", (10.0, 11.0, 12.0))).to_json(), "utf-8")
    changed = made_result(Measure("decode.1.tokens_per_s", (20.0, 22.0, 24.0)), options={"repeats": 3})
    other.write_text(changed.to_json(), "utf-8")
    done = nsm("bench", "compare", one, other)
    assert done.exit_code == 0
    assert "2.000" in done.stdout
    assert "better" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("to judge a change use `nsm bench gate`, which takes turns.")
    assert done.stderr == "options: repeats is 2 and 3\n"
    (row,) = json.loads(nsm("bench", "compare", one, other, "--json").stdout)
    assert row["ratio"] == 2.0


def test_a_file_that_is_no_result_is_one_line(nsm: Nsm, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("{}", "utf-8")
    assert_one_line(nsm("bench", "compare", file, file), f"{file}: not a benchmark's result: KeyError: 'format'")


@pytest.mark.parametrize(("rate", "status"), [(100.0, 0), (97.0, 0), (80.0, 1), (130.0, 0)])
def test_gate_passes_without_a_loss(
    nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, status: int
) -> None:
    base = stand_in(tmp_path / "base", "base", rates=(100.0,))
    new = stand_in(tmp_path / "new", "new", rates=(rate,))
    monkeypatch.setattr(builds.Build, "at", lambda name, root: base)
    monkeypatch.setattr(builds, "this_build", lambda: new)
    done = nsm("bench", "gate", "--base", tmp_path)
    assert done.exit_code == status
    assert ("LOST" in done.stdout) == bool(status)


def test_a_gate_with_too_few_rounds_is_refused_before_any_is_run(nsm: Nsm, tmp_path: Path) -> None:
    done = nsm("bench", "gate", "--base", tmp_path, "--rounds", 3, "--batches", "1,2")
    assert done.exit_code == 2
    assert f"at least {rounds_needed(4)}" in done.stderr


def test_a_build_measures_itself_in_a_process_of_its_own() -> None:
    """What the gate does for each round."""
    few = ("--batches", "1", "--lengths", "20", "--tokens", "2", "--repeats", "1")
    taken = builds.Build.at("base", Path(__file__).parents[3]).measure(few)
    looked_at = {"decode.1.tokens_per_cpu_s", "prefill.20.tokens_per_cpu_s", "session.20.resumed_cpu_ms"}
    assert looked_at <= {name for name, value in taken.items() if value > 0}
    wanted = {name for name in taken if any(fnmatch.fnmatch(name, pattern) for pattern in CPU_MEASURES)}
    assert wanted == looked_at  # as many as the gate reckons with before it has seen any


def test_components_are_timed_and_traced(nsm: Nsm, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = nsm(
        "bench", "components", "--batches", "2", "--lengths", "20", "--repeats", "2", "--profile", trace, "--json"
    )
    assert done.exit_code == 0, done.output
    measures = BenchResult.from_json(done.stdout).by_name()
    for run in ("decode.2", "prefill.20"):
        parts = [name for name in measures if name.startswith(run)]
        named = {name.removeprefix(f"{run}.").removesuffix("_cpu_ms") for name in parts}
        assert {"router", "slots", "feed_forward", "head", "model", "all"} <= named
        whole = measures[f"{run}.all_cpu_ms"].values
        assert [sum(measures[name].values[i] for name in parts) for i in (0, 1)] == pytest.approx(
            [2 * x for x in whole]
        )
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"nsm.router", "nsm.slots", "nsm.head", "aten::linear"} <= names


def test_the_engines_own_thread_is_traced(nsm: Nsm, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    sizes = ("--batches", 1, "--lengths", 20, "--tokens", 2, "--repeats", 1)
    done = nsm("bench", "engine", *sizes, "--executor", "eager", "--profile", trace)
    assert done.exit_code == 0, done.output
    events = json.loads(trace.read_text())["traceEvents"]
    assert "nsm.router" in {event.get("name") for event in events}
