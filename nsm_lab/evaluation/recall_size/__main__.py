"""Command line of recall against state size: `python -m nsm_lab.evaluation.recall_size`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsm_core.execution.devices import resolve_device
from nsm_lab.evaluation.recall_size.grid import Plan, SizeRun, train
from nsm_lab.evaluation.recall_size.points import CURVES, SIZES
from nsm_lab.evaluation.recall_size.report import figure, markdown
from nsm_lab.evaluation.recall_size.side_by_side import run_side_by_side
from nsm_lab.evaluation.recall_size.workers import run_all
from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.provenance import origin


def build_parser() -> argparse.ArgumentParser:
    """The grid. A second call with the same options goes on where the first was stopped."""
    parser = argparse.ArgumentParser("python -m nsm_lab.evaluation.recall_size", description=__doc__)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--tuning-size", type=int, default=SIZES[1], help="where each layer's rate is chosen")
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4, help="passes over the examples (Zoology: 32)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--share", type=float, default=1.0, help="of Zoology's examples, for trials")
    parser.add_argument("--workers", type=int, default=6, help="trainings side by side: processes, on a GPU streams")
    parser.add_argument(
        "--time-limit-s", type=float, default=math.inf, help="then it stops; on a CPU what runs is lost"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="OUTPUT.jsonl, OUTPUT.md and OUTPUT.svg")
    return parser


def write_report(plan: Plan, runs: RunsFile, output: Path) -> None:
    """Table and figure from the runs so far."""
    rates, results = plan.rates(runs), plan.of_this(runs.results)
    facts = {
        **origin(),
        "examples": f"{plan.share:g} of Zoology's, passes: {plan.epochs}, batches of {plan.batch}",
        "devices": ", ".join(sorted({result["device"] for result in results})),
    }
    how = "\n".join(f"- {name}: `{value}`" for name, value in facts.items())
    text = f"# Recall against state size\n\n{markdown(results, rates)}\n\n## How it was measured\n\n{how}\n"
    output.with_suffix(".md").write_text(text, "utf-8")
    if rates:
        output.with_suffix(".svg").write_text(figure(results, rates), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if a training failed twice; 0 also when the time was too short."""
    options = build_parser().parse_args(argv)
    deadline, device = time.monotonic() + options.time_limit_s, resolve_device(options.device)
    plan = Plan(
        curves=options.curves, sizes=options.sizes, lrs=options.lrs, seeds=options.seeds, epochs=options.epochs,
        tuning_size=options.tuning_size, batch=options.batch, share=options.share,
    )  # fmt: skip
    runs = RunsFile(options.output.with_suffix(".jsonl"))

    def done(run: SizeRun, outcome: dict[str, Any]) -> None:
        runs.add(dataclasses.asdict(run), outcome)
        line = f"{run.curve} {run.size} {run.lr:g} seed {run.seed}: {outcome['mean']:.4f}, {outcome['seconds']:.0f} s"
        print(line, flush=True)
        write_report(plan, runs, options.output)

    failed: list[SizeRun] = []
    for stage in (plan.tuning, lambda: plan.points(runs)):
        todo, limits = plan.missing(stage(), runs), {"deadline": deadline, "done": done}
        if device.startswith("cuda"):
            failed += run_side_by_side(todo, device=device, lanes=options.workers, **limits)
        else:
            failed += run_all(todo, train, device=device, workers=options.workers, **limits)
    write_report(plan, runs, options.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
