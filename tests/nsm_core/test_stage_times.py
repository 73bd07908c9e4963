"""The stages of a start, as one line of the log."""

from __future__ import annotations

import os
import subprocess
import sys

from nsm_core.stage_times import StageTimes, process_age_s


def test_stages_follow_each_other_and_their_sum_is_the_whole() -> None:
    now = iter((102.0, 103.5))
    times = StageTimes(100.0, clock=lambda: next(now))
    times.ended("imports")
    times.ended("model")
    assert str(times) == "imports 2.0 s, model 1.5 s"
    assert times.seconds == 3.5


def test_a_process_is_younger_than_the_one_that_started_it() -> None:
    program = "from nsm_core.stage_times import process_age_s; print(process_age_s())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert 0.0 < float(done.stdout) < process_age_s()
