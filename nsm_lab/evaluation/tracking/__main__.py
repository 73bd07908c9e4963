"""Command line of the comparison on state tracking: `python -m nsm_lab.evaluation.tracking`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.evaluation.tracking.grid import Grid, trained
from nsm_lab.evaluation.tracking.layers import LAYERS
from nsm_lab.evaluation.tracking.report import markdown
from nsm_lab.evaluation.tracking.tasks import TASKS
from nsm_lab.evaluation.tracking.train import TrackingOutcome, TrackingRun
from nsm_lab.provenance import origin


def build_parser() -> argparse.ArgumentParser:
    """The grid: every task with every layer, all rates with the first seed, the best of them with the others."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrackingRun)}
    parser = argparse.ArgumentParser("python -m nsm_lab.evaluation.tracking", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-3, 1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="the first tunes the rate")
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--rows", type=int, default=defaults["rows"], help="strings a step")
    parser.add_argument("--num-layers", type=int, default=defaults["num_layers"])
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each (default %(default)s)")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="no run begins after so many seconds")
    parser.add_argument("--output", type=Path, required=True, help="OUTPUT.jsonl has the runs, OUTPUT.md the table")
    return parser


def write_report(options: argparse.Namespace, runs: RunsFile) -> None:
    """OUTPUT.md from the runs so far."""
    facts = {
        **origin(),
        "training": f"{options.steps} steps of {options.rows} strings; CPU time "
        f"{sum(result['cpu_s'] for result in runs.results):,.0f} s for {len(runs.results)} runs",
    }
    how = "\n".join(f"- {name}: `{value}`" for name, value in facts.items())
    text = f"# State tracking\n\n{markdown(runs.results, options.seeds[0])}\n## How it was measured\n\n{how}\n"
    options.output.with_suffix(".md").write_text(text, "utf-8")


def _take(runs: RunsFile, run: TrackingRun, outcome: TrackingOutcome) -> None:
    runs.add(dataclasses.asdict(run), dataclasses.asdict(outcome))
    accuracies = " ".join(f"{accuracy:.3f}" for accuracy in outcome.accuracies)
    line = f"{run.task} {run.layer} {run.lr:g} seed {run.seed}: {accuracies}, {outcome.steps_run} steps"
    print(f"{line}, {outcome.cpu_s:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing; the table is written anew after every run. Exit status 0 also if the time was too short."""
    options = build_parser().parse_args(argv)
    deadline = time.monotonic() + options.time_limit_s
    runs = RunsFile(options.output.with_suffix(".jsonl"))
    grid = Grid(
        tasks=options.tasks, layers=options.layers, lrs=options.lrs, seeds=options.seeds, steps=options.steps,
        rows=options.rows, num_layers=options.num_layers,
    )  # fmt: skip
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for seed in options.seeds:
            waiting = [pool.submit(trained, run, deadline) for run in grid.wanted(runs, seed)]
            for done in as_completed(waiting):
                run, outcome = done.result()
                if outcome is not None:
                    _take(runs, run, outcome)
                    write_report(options, runs)
    write_report(options, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
