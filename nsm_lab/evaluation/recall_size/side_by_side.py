"""Trainings side by side in one process, each recorded on a stream of its own.

Processes take turns on a GPU; streams of one process use it at the same time. After a failed launch nothing runs in
the process any more: the command, called again, goes on with the trainings that are missing.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence

import torch

from nsm_lab.evaluation.mqar.recorded import RecordedRecall, Recorder
from nsm_lab.evaluation.mqar.train import Recall
from nsm_lab.evaluation.recall_size.grid import SizeRun, mqar_config, outcome_of
from nsm_lab.evaluation.recall_size.workers import Done


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    """A training and the stream that it is on."""

    run: SizeRun
    recorder: Recorder
    training: RecordedRecall


def run_side_by_side(runs: Sequence[SizeRun], *, device: str, lanes: int, deadline: float, done: Done) -> list[SizeRun]:
    """Calls `done` for each training that ends; returns those that could not be prepared.

    Where the memory is too small for so many at once, it goes on with fewer. `deadline`, of `time.monotonic`: no
    training begins that would end after it if it took as long as the longest.
    """
    todo, failed, longest = deque(runs), list[SizeRun](), 0.0
    idle, busy = [Recorder(device) for _ in range(min(lanes, len(runs)))], list[_Lane]()
    while True:
        if idle and todo and time.monotonic() + longest < deadline:
            run, recorder = todo.popleft(), idle.pop()
            try:
                busy.append(_Lane(run, recorder, RecordedRecall(Recall(mqar_config(run, device)), recorder)))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) and busy:
                    todo.appendleft(run)  # when another has ended; this stream is given up
                    continue
                sys.stderr.write(f"{run}: {traceback.format_exc()}\n")
                failed.append(run)
                idle.append(Recorder(device))
        elif busy:
            min((lane.training for lane in busy), key=lambda training: training.num_waiting).wait()
        else:
            return failed
        for lane in busy:
            lane.training.advance()
        for lane in [lane for lane in busy if lane.training.is_done]:
            outcome = outcome_of(lane.training.report())
            longest = max(longest, outcome["seconds"])
            busy.remove(lane)
            idle.append(lane.recorder)
            done(lane.run, outcome)
