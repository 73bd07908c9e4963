"""Builds in turns, each run a real process: a script that stands for a build's Python."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError, NsmError
from nsm_lab.bench.builds import Build, in_turns, this_build
from nsm_lab.bench.result import Measure
from tests.nsm_lab.bench.made_results import made_result

NAME = "decode.1.tokens_per_cpu_s"


def stand_in(directory: Path, name: str, *, rates: tuple[float, ...] = (100.0,), status: int = 0) -> Build:
    """Notes each run in `runs`, complains, and writes a result to where --output says."""
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(made_result(Measure(NAME, rates)).to_json(), "utf-8")
    script = directory / "python"
    script.write_text(
        f'#!/bin/sh\necho "{name} $*" >> "{directory.parent}/runs"\necho "nsm: it broke" >&2\n'
        f'for last; do :; done\ncp "{directory}/result.json" "$last"\nexit {status}\n',
        "utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Build(name=name, root=directory, python=script)


def test_builds_take_turns_and_the_first_changes_each_round(tmp_path: Path) -> None:
    base = stand_in(tmp_path / "base", "base", rates=(90.0, 100.0, 400.0))
    new = stand_in(tmp_path / "new", "new", rates=(50.0,))
    done: list[int] = []
    measures = in_turns(base, new, ["--tokens", "1"], rounds=3, on_progress=done.append)
    assert measures == ((Measure(NAME, (100.0,) * 3),), (Measure(NAME, (50.0,) * 3),))
    runs = (tmp_path / "runs").read_text("utf-8").splitlines()
    assert [run.split()[0] for run in runs] == ["base", "new", "new", "base", "base", "new"]
    assert all("bench engine --tokens 1 --output " in run for run in runs)
    assert done == [1, 2, 3]


def test_a_build_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    build = stand_in(tmp_path / "base", "base", status=2)
    with pytest.raises(NsmError, match="the base build failed with status 2: nsm: it broke"):
        build.measure([])


def test_a_checkout_runs_in_its_own_environment_if_it_has_one(tmp_path: Path) -> None:
    (tmp_path / "service" / "cli").mkdir(parents=True)
    (tmp_path / "service" / "cli" / "bench.py").touch()
    assert Build.at("base", tmp_path).python == Path(sys.executable)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert Build.at("base", tmp_path) == Build(name="base", root=tmp_path, python=python)


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkout that can measure itself"):
        Build.at("base", tmp_path)


def test_this_build_is_the_one_that_runs() -> None:
    assert (this_build().root / "nsm_lab" / "bench" / "builds.py").is_file()


@pytest.mark.skipif(shutil.which("git") is None, reason="the script checks a commit out with git")
def test_a_base_that_is_no_commit_is_told_once(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    script = Path(__file__).parents[3] / "scripts" / "bench-gate"
    done = subprocess.run([script, tmp_path, "nosuch"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nosuch" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
