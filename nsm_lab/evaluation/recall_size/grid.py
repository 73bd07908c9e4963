"""Which trainings the figure needs, in the order in which it becomes whole, and one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsm_lab.evaluation.mqar.config import MqarConfig
from nsm_lab.evaluation.mqar.data import TEST_TASKS, TRAIN_TASKS, Task
from nsm_lab.evaluation.mqar.report import MqarReport
from nsm_lab.evaluation.mqar.train import Recall
from nsm_lab.evaluation.recall_size.points import model_config
from nsm_lab.evaluation.runs_file import RunsFile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeRun:
    """One training: a layer, numbers of state, a rate, a seed. `share`: of Zoology's examples, for trials."""

    curve: str
    size: int
    lr: float
    seed: int
    epochs: int
    batch: int = 256
    share: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The grid. Each layer's rate is the one with the lowest training loss at `tuning_size`, with the first seed."""

    curves: Sequence[str]
    sizes: Sequence[int]
    lrs: Sequence[float]
    seeds: Sequence[int]
    epochs: int
    tuning_size: int
    batch: int = 256
    share: float = 1.0

    def tuning(self) -> list[SizeRun]:
        """Every layer at one size with every rate."""
        return [
            self._run(curve, self.tuning_size, lr, self.seeds[0])
            for lr in self.lrs for curve in self.curves
        ]  # fmt: skip

    def points(self, runs: RunsFile) -> list[SizeRun]:
        """All sizes and seeds of the layers whose rate is known, seed after seed."""
        return [
            self._run(curve, size, lr, seed)
            for seed in self.seeds for size in self.sizes for curve, lr in self.rates(runs).items()
        ]  # fmt: skip

    def of_this(self, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of `results` that were trained as this grid is: as long, on as many examples, in such batches."""
        protocol = {"epochs": self.epochs, "batch": self.batch, "share": self.share}
        return [result for result in results if protocol.items() <= result["run"].items()]

    def missing(self, wanted: Sequence[SizeRun], runs: RunsFile) -> list[SizeRun]:
        """Those of `wanted` without a result."""
        return [run for run in wanted if runs.find(dataclasses.asdict(run)) is None]

    def rates(self, runs: RunsFile) -> dict[str, float]:
        """The rate of each layer that has been tuned."""
        rates = dict[str, float]()
        for curve in self.curves:
            tried = [runs.find(dataclasses.asdict(run)) for run in self.tuning() if run.curve == curve]
            done = [result for result in tried if result is not None]
            if len(done) == len(self.lrs):
                rates[curve] = float(min(done, key=lambda result: float(result["train_loss"]))["run"]["lr"])
        return rates

    def _run(self, curve: str, size: int, lr: float, seed: int) -> SizeRun:
        return SizeRun(curve=curve, size=size, lr=lr, seed=seed, epochs=self.epochs, batch=self.batch, share=self.share)


def train(run: SizeRun, device: str) -> dict[str, Any]:
    """One training by itself."""
    return outcome_of(Recall(mqar_config(run, device)).run())


def outcome_of(report: MqarReport) -> dict[str, Any]:
    """What the results' file keeps of a training."""
    last = report.history[-1]
    return {
        "mean": report.test_mean,
        "accuracies": [[row.length, row.pairs, row.accuracy] for row in report.accuracies],
        "train_loss": last.train_loss,
        "epochs_run": last.number,
        "seconds": last.elapsed_s,
        "memory_elements": report.memory_elements,
        "state_elements": report.state_elements,
        "num_parameters": report.num_parameters,
        "device": report.device,
    }


def mqar_config(run: SizeRun, device: str) -> MqarConfig:
    return MqarConfig(
        model=model_config(run.curve, run.size),
        train_tasks=_shortened(TRAIN_TASKS, run.share),
        test_tasks=_shortened(TEST_TASKS, run.share),
        batch=run.batch,
        epochs=run.epochs,
        lr=run.lr,
        seed=run.seed,
        device=device,
    )


def _shortened(tasks: Sequence[Task], share: float) -> tuple[Task, ...]:
    return tuple(dataclasses.replace(task, num_examples=max(8, round(task.num_examples * share))) for task in tasks)


Train = Callable[[SizeRun, str], Mapping[str, Any]]
