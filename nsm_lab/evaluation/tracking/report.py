"""The table of a comparison on state tracking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsm_lab.evaluation.markdown import table
from nsm_lab.evaluation.tracking.layers import LAYERS
from nsm_lab.evaluation.tracking.tasks import TASKS
from nsm_lab.evaluation.tracking.train import MULTIPLES, constant_accuracies

Results = Sequence[Mapping[str, Any]]


def chosen_rate(results: Results, task: str, layer: str, seed: int) -> float | None:
    """The rate with the lowest training loss among runs of one seed; the test decides nothing."""
    tried = [result for result in _of(results, task, layer) if result["run"]["seed"] == seed]
    return min(tried, key=lambda result: float(result["train_loss"]))["run"]["lr"] if tried else None


def markdown(results: Results, first_seed: int = 0) -> str:
    """A table a task: the accuracies of each layer at its chosen rate, mean and range over seeds."""
    return "\n\n".join(_task_table(results, task, first_seed) for task in TASKS if _of(results, task)) + "\n"


def _task_table(results: Results, task: str, first_seed: int) -> str:
    lengths = [f"length {multiple * TASKS[task].length}" for multiple in MULTIPLES]
    rows = [_row(results, task, layer, first_seed) for layer in LAYERS if _of(results, task, layer)]
    constant = [f"{accuracy:.0%}" for accuracy in constant_accuracies(TASKS[task])]
    heads = ("layer", *lengths, "rate", "seeds", "steps", "parameters")
    return f"## {TASKS[task].title}\n\n" + table(heads, [*rows, ["most frequent answer", *constant, "", "", "", ""]])


def _row(results: Results, task: str, layer: str, first_seed: int) -> list[str]:
    rate = chosen_rate(results, task, layer, first_seed)
    runs = [result for result in _of(results, task, layer) if result["run"]["lr"] == rate]
    by_length = zip(*(result["accuracies"] for result in runs), strict=True)
    steps = "–".join(str(bound) for bound in sorted({min(_steps(runs)), max(_steps(runs))}))
    parameters = f"{runs[0]['num_parameters']:,}"
    return [LAYERS[layer].title, *map(_spread, by_length), f"{rate:g}", str(len(runs)), steps, parameters]


def _spread(accuracies: Sequence[float]) -> str:
    mean = sum(accuracies) / len(accuracies)
    if len(accuracies) == 1 or max(accuracies) - min(accuracies) < 0.01:
        return f"{mean:.1%}"
    return f"{mean:.1%} ({min(accuracies):.0%}–{max(accuracies):.0%})"


def _steps(runs: Results) -> list[int]:
    return [int(result["steps_run"]) for result in runs]


def _of(results: Results, task: str, layer: str | None = None) -> list[Mapping[str, Any]]:
    return [
        result for result in results
        if result["run"]["task"] == task and (layer is None or result["run"]["layer"] == layer)
    ]  # fmt: skip
