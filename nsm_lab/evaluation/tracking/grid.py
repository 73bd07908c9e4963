"""Which runs a comparison consists of, and one of them in a process of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.evaluation.tracking.report import chosen_rate
from nsm_lab.evaluation.tracking.train import TrackingOutcome, TrackingRun, train


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every task with every layer: all rates with the first seed, the best of them with the others."""

    tasks: Sequence[str]
    layers: Sequence[str]
    lrs: Sequence[float]
    seeds: Sequence[int]
    steps: int
    rows: int
    num_layers: int

    def wanted(self, runs: RunsFile, seed: int) -> list[TrackingRun]:
        """The runs with a seed that are still to do."""
        pairs = [(task, layer) for task in self.tasks for layer in self.layers]
        wanted = [run for task, layer in pairs for run in self._of_pair(runs, task, layer, seed)]
        return [run for run in wanted if runs.find(dataclasses.asdict(run)) is None]

    def _of_pair(self, runs: RunsFile, task: str, layer: str, seed: int) -> Iterator[TrackingRun]:
        tuning = [self._run(task, layer, lr, self.seeds[0]) for lr in self.lrs]
        if seed == self.seeds[0]:
            yield from tuning
        elif all(runs.find(dataclasses.asdict(run)) is not None for run in tuning):
            lr = chosen_rate(runs.results, task, layer, self.seeds[0])
            if lr is not None:
                yield self._run(task, layer, lr, seed)

    def _run(self, task: str, layer: str, lr: float, seed: int) -> TrackingRun:
        return TrackingRun(
            task=task, layer=layer, lr=lr, seed=seed, steps=self.steps, rows=self.rows, num_layers=self.num_layers
        )


def trained(run: TrackingRun, deadline: float) -> tuple[TrackingRun, TrackingOutcome | None]:
    """The run's outcome; None where the deadline, of `time.monotonic`, is past. One thread: runs are side by side."""
    torch.set_num_threads(1)
    return run, train(run) if time.monotonic() < deadline else None
