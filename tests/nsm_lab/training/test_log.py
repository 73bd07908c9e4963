"""A run says what it does before it can show numbers, and is never silent for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_lab.training.log import QUIET_S, TrainLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_is_logged_and_no_silence_is_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainLog(tmp_path, total_steps=40, first_step=2, enabled=True, clock=clock) as log:
        for _ in range(10):
            clock.now += QUIET_S / 4
            log.advance()
        log.write({"step": 12, "train_loss": 3.0})
        clock.now += QUIET_S - 1
        log.progress("validation batch 1 of 2")
        clock.now += 1
        log.progress("validation batch 2 of 2")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "step 3 of 40, 5 s",
        "step 7 of 40, 25 s",
        "step 11 of 40, 45 s",
        "validation batch 2 of 2, 70 s",
    ]
    assert captured.out == "step 12  train_loss 3  elapsed_s 50\n"


def test_other_processes_of_a_run_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainLog(tmp_path, total_steps=4, first_step=0, enabled=False) as log:
        log.advance()
        log.progress("anything", at_once=True)
    assert capsys.readouterr() == ("", "")
