"""The products compile for a Hopper GPU, and none of their tiles is overwritten while it is read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the compiler is not installed")

# In processes of their own: in this one the kernels may run in the interpreter
ENV = os.environ | {"TRITON_INTERPRET": "0"}


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=ENV, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_normed_product_does_not_race() -> None:
    assert run("-m", "benchmarks.decode_builds", "--form", "router").count("0 B stack") == 2


def test_a_tile_that_threads_and_matrix_units_read_is_found() -> None:
    assert "MAY RACE" in run("-m", "tests.nsm_core.execution.cuda.racing_kernel")
