"""What a start begins early on a GPU changes nothing where there is none."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from nsm_core.execution.cuda import early_start


def test_steps_follow_each_other_up_to_the_first_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[str] = []

    def fails(device: str) -> None:
        taken.append(f"no {device}")
        raise RuntimeError("the driver answers 100")

    with caplog.at_level(logging.DEBUG):
        early_start.begin("cuda:1", steps=(taken.append, fails, taken.append)).join()
    assert taken == ["cuda:1", "no cuda:1"]
    assert not caplog.records


def test_a_machine_without_a_driver_reads_no_compiler_and_no_torch() -> None:
    code = (
        "import sys; from nsm_core.execution.cuda import early_start; early_start.DRIVER = 'libnodriver.so.1'; "
        "early_start.begin('auto').join(); print({'torch', 'triton'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_compiler_keeps_its_hash_and_its_import_leaves_torch_alone() -> None:
    pytest.importorskip("triton", reason="the compiler is not installed")
    code = (
        "import sys; from nsm_core.execution.cuda import early_start; early_start.hash_compiler('cuda'); "
        "from triton.runtime.cache import triton_key; "
        "print(triton_key.cache_info().currsize, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("1 False\n", "")
