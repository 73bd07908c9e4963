"""The products compile for a Hopper GPU, and none of their tiles is overwritten while it is read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the compiler is not installed")

# In processes of their own: in this one the kernels may run in the interpreter
ENV = os.environ | {"TRITON_INTERPRET": "0"}
RACING = """
from benchmarks import decode_builds as builds
constants = {"NORM": True, "GATED": False, "SPLIT": False, "ROWS": 64, "COLS": 32, "DEPTH": 64, "PRECISION": "ieee"}
types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": None, "residual_ptr": None, "out_ptr": "*bf16"}
assert not builds.build("racing", builds.linear._linear, types, constants, num_warps=4, num_stages=5)
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=ENV, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_normed_product_does_not_race() -> None:
    assert run("-m", "benchmarks.decode_builds", "--form", "router").count("0 B stack") == 2


def test_a_tile_that_threads_and_matrix_units_read_is_found() -> None:
    assert "MAY RACE" in run("-c", RACING)
