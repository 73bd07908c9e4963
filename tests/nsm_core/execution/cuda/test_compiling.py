"""Kernels are compiled ahead in other processes, and the process that launches them finds them in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the compiler is not installed")


def test_what_is_launched_is_compiled_by_other_processes_and_found_here(tmp_path: Path) -> None:
    # in a process of its own: in this one the kernels may run in the interpreter
    environ = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.nsm_core.execution.cuda.compiling_start"]
    for num_compiled, rehearsed in ((3, ["one", "other"]), (0, [])):  # an earlier start left a note of each
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "variants": 3, "compiled": num_compiled, "hits": [True, True, True], "rehearsed": rehearsed
        }  # fmt: skip


def test_a_cache_that_takes_no_note_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsm_core.execution.cuda import compiling, start_note

    (tmp_path / "file").touch()
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "a GPU"))
    monkeypatch.setattr(start_note, "driver", driver)
    monkeypatch.setattr(start_note.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    rehearsed: list[str] = []
    for _ in range(2):
        note = start_note.StartNote.of("one")
        assert compiling.compile_ahead(lambda: rehearsed.append("kernels"), note=note) == 0
    assert rehearsed == ["kernels", "kernels"]


def test_a_kernel_that_does_not_compile_is_named_and_left_to_its_launch(tmp_path: Path) -> None:
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    variant = {"module": "nsm_core.execution.cuda.kernels.overlap", "name": "_resolve", "data": "{}"}
    lines = "".join(json.dumps(line) + "\n" for line in (target, variant))
    environ = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "nsm_core.execution.cuda.compiling_process"]
    done = subprocess.run(command, env=environ, input=lines, capture_output=True, text=True, timeout=100)
    assert done.stdout == "KeyError: 'name'\n"


@pytest.mark.gpu
def test_a_start_launches_no_kernel_that_its_rehearsal_did_not_know(tmp_path: Path) -> None:
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.nsm_core.execution.cuda.gpu_start"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["compiled"] > 10
    good = {"late": [], "failure": None, "has_rounds": True, "same_bits": True}
    assert answer == {"compiled": answer["compiled"], **good}
