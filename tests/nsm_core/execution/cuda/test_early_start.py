"""What a start begins early on a GPU changes nothing where there is none."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from nsm_core.execution.cuda import early_start


def test_a_gpu_that_cannot_be_opened_early_is_left_to_the_start(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def fails(device: str) -> None:
        asked.append(device)
        raise RuntimeError("the driver answers 100")

    with caplog.at_level(logging.DEBUG):
        early_start.begin("cuda:1", open_context=fails).join()
    assert asked == ["cuda:1"]
    assert not caplog.records


def test_a_machine_without_a_driver_starts_without_a_word_and_without_torch() -> None:
    code = (
        "import sys; from nsm_core.execution.cuda import early_start; early_start.DRIVER = 'libnodriver.so.1'; "
        "early_start.begin('auto').join(); print({'torch', 'triton'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("set()\n", "")
