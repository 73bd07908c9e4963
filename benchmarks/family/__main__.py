"""Every variant of the family beside the baselines: `python -m benchmarks.family --device cuda --output OUT`.

Measured of each model, at nearly equal numbers of parameters: operations (counted), forward and backward time with
spread, memory, gradient norms, training and prefill tokens/s by length, decode time, bytes of the carried state, and
bits per byte of Tiny Shakespeare after the same training. `models.py` names the models. Every result is a file under
OUT/cells: the same command again measures what is missing and writes `table.md`, `table.json` and the pictures anew;
`--render` does only that. With `--workers` above 0 models are trained by as many processes side by side, before
anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from benchmarks.family.cells import Plan, is_done, read_cells, run_cell, set_up
from benchmarks.family.models import ENTRIES, SIZES
from benchmarks.family.page import put_on_page
from benchmarks.family.quality import TEXT
from benchmarks.family.report import write_report
from nsm_lab.provenance import command_line, source_commit

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# size, lengths, rows and steps of training, learning rates, workers
DEFAULTS = {
    "cuda": {
        "size": "medium",
        "lengths": LENGTHS,
        "rows": 16,
        "steps": 250,
        "lrs": (2e-3,),
        "cell_s": 3.0,
        "workers": 6,
        "held_out": 10**6,
    },
    "cpu": {
        "size": "small",
        "lengths": LENGTHS,
        "rows": 4,
        "steps": 60,
        "lrs": (3e-3,),
        "cell_s": 8.0,
        "workers": 0,
        "held_out": 16384,
    },
}
LEARNING_SHARE = 0.6  # of the budget, at most


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=float, default=250.0, help="no cell is begun after that")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(ENTRIES), metavar="MODEL", default=list(ENTRIES))
    parser.add_argument("--size", choices=list(SIZES))
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--decode-rows", type=int, nargs="+", default=(1, 64))
    parser.add_argument("--rows", type=int, help="of a training step")
    parser.add_argument("--steps", type=int, help="of the training on Tiny Shakespeare")
    parser.add_argument("--held-out", type=int, help="bytes that are measured on, at most")
    parser.add_argument("--lrs", type=float, nargs="+")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--repeat-s", type=float, default=0.1, help="time to repeat a measurement for")
    parser.add_argument("--cell-s", type=float, help="a timed cell's limit")
    parser.add_argument("--quality-s", type=float, default=60.0, help="the limit of a training run")
    parser.add_argument("--note", default="", help="a line for the head of the table")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--page", type=Path, help="a page of the documentation to put the tables on")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(
        models=tuple(options.models),
        size=options.size,
        device=options.device,
        lengths=tuple(sorted(options.lengths)),
        decode_rows=tuple(options.decode_rows),
        lrs=tuple(options.lrs),
        steps=options.steps,
        rows=options.rows,
        held_out=options.held_out,
        text=options.text,
        output=options.output,
        repeat_s=options.repeat_s,
        limit_s=options.cell_s,
        quality_limit_s=options.quality_s,
        ends_at=time.time() + options.budget_s,
    )


def say(model: str, cell: str, row: dict[str, object], started: float) -> None:
    shown = row.get("reason") or {key: round(value, 4) for key, value in row.items() if isinstance(value, int | float)}
    print(f"{time.monotonic() - started:7.1f} s  {model:18} {cell:14} {shown}", flush=True)


def learn(plan: Plan, workers: int, started: float) -> None:
    """What trains and counts, by processes side by side."""
    cells = [cell for cell in plan.learned() if not is_done(plan.output, *cell)]
    if workers == 0:
        for cell in cells:
            say(*cell, run_cell(plan, *cell), started)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=set_up) as pool:
        running = {pool.submit(run_cell, plan, *cell): cell for cell in cells}
        for future in as_completed(running):
            error = future.exception()  # of the process: what goes wrong in a cell is in its row
            say(*running[future], {"reason": repr(error)} if error else future.result(), started)


def header(options: argparse.Namespace) -> dict[str, object]:
    is_cuda = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else f"{platform.machine()}, one thread",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": source_commit(),
        "command": command_line(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "note": options.note,
        "size": options.size,
        "rows": options.rows,
        "steps": options.steps,
        "train_len": SIZES[options.size].train_len,
        "precision": "bf16 autocast, TF32 elsewhere" if is_cuda else "fp32",
    }


def main() -> int:
    options = parse_options()
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    head = options.output / "header.json"
    if not options.render:
        set_up()
        head.write_text(json.dumps(header(options), indent=1) + "\n", "utf-8")
        plan = plan_of(options)
        learning_ends = time.time() + LEARNING_SHARE * options.budget_s
        learn(dataclasses.replace(plan, ends_at=learning_ends), options.workers, started)
        for cell in (cell for cell in plan.timed() if not is_done(plan.output, *cell)):
            say(*cell, run_cell(plan, *cell), started)
    write_report(options.output, json.loads(head.read_text("utf-8")), read_cells(options.output))
    if options.page:
        put_on_page(options.page, options.device, options.output)
    print(f"{options.output / 'table.md'} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
