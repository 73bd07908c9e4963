"""The cells of the table: what is measured of a model, each a file of its own, so that a run that ended goes on."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.family.counting import count_model
from benchmarks.family.models import ENTRIES, SIZES, config_of, count_parameters
from benchmarks.family.quality import train_and_measure
from benchmarks.family.timing import Row, Timer, TooSlow, time_decode, time_prefill, time_training
from nsm_core.model.nsm import NsmModel

LATE = "no time left"
LARGE = ("8192", "16384", "32768")  # tokens: what such a cell leaves to the allocator is of no use to others


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run depends on; `lengths` in tokens, `ends_at` as of time.time()."""

    models: tuple[str, ...]
    size: str
    device: str
    lengths: tuple[int, ...]
    decode_rows: tuple[int, ...]
    lrs: tuple[float, ...]
    steps: int
    rows: int
    held_out: int
    text: Path
    output: Path
    repeat_s: float
    limit_s: float
    quality_limit_s: float
    ends_at: float

    def learned(self) -> list[tuple[str, str]]:
        """(model, cell): those that train, and what is counted; they need no quiet machine."""
        cells = ["size", *(f"quality-{lr:g}" for lr in self.lrs)]
        return [(model, cell) for cell in cells for model in self.models]

    def timed(self) -> list[tuple[str, str]]:
        """Those that are timed, short ones of all models first."""
        kinds = ["step", *(f"decode-{rows}" for rows in self.decode_rows)]
        # every other length first: a run that ends early has holes, not an end
        kinds += [
            f"{kind}-{length}" for half in (0, 1) for length in self.lengths[half::2] for kind in ("prefill", "train")
        ]
        return [(model, cell) for cell in kinds for model in self.models]


def set_up() -> None:
    """What every process of a run does first. TF32 for products outside of autocast: bf16 is no more exact."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")


def cell_path(output: Path, model: str, cell: str) -> Path:
    return output / "cells" / f"{model}.{cell}.json"


def read_cells(output: Path) -> dict[str, dict[str, Row]]:
    """{model: {cell: row}} of what has been measured, models in the table's order."""
    found: dict[str, dict[str, Row]] = {name: {} for name in ENTRIES}
    for path in sorted((output / "cells").glob("*.json")):
        model, _, cell = path.stem.partition(".")
        if model in found:
            found[model][cell] = json.loads(path.read_text("utf-8"))
    return {name: cells for name, cells in found.items() if cells}


def is_done(output: Path, model: str, cell: str) -> bool:
    """Measured, or known not to be measurable; a cell that there was no time for is tried again."""
    path = cell_path(output, model, cell)
    return path.exists() and json.loads(path.read_text("utf-8")).get("reason") != LATE


def run_cell(plan: Plan, model: str, cell: str) -> Row:
    """Measures and writes one cell; what goes wrong becomes its `reason`."""
    row: Row
    try:
        row = {"reason": LATE} if time.time() > plan.ends_at else _measure(plan, model, cell)
    except TooSlow as error:
        row = {"reason": str(error)}
    except torch.OutOfMemoryError:
        row = {"reason": "out of memory"}
    except Exception as error:
        # one model that fails must not cost the others their measurement
        traceback.print_exc(limit=-4)
        row = {"reason": f"{type(error).__name__}: {str(error).strip()[:200]}"}
    path = cell_path(plan.output, model, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(row) + "\n", "utf-8")
    partial.replace(path)
    if "reason" in row:
        gc.collect()  # a traceback holds on to the tensors of its frames
    if plan.device == "cuda" and ("reason" in row or cell.endswith(LARGE)):
        torch.cuda.empty_cache()
    return row


def _measure(plan: Plan, model: str, cell: str) -> Row:
    kind, _, value = cell.partition("-")
    size = SIZES[plan.size]
    timer = Timer(torch.device(plan.device), plan.repeat_s, plan.limit_s)
    if kind == "size":
        return _facts(plan, model)
    if kind == "quality":
        left = min(plan.quality_limit_s, plan.ends_at - time.time())
        row = train_and_measure(
            model,
            size,
            lr=float(value),
            steps=plan.steps,
            rows=plan.rows,
            held_out=plan.held_out,
            text=plan.text,
            device=timer.device,
            limit_s=left,
        )
        # cut short by the end of the run and not by its own limit: the next run tries again
        return {"reason": LATE} if "reason" in row and left < plan.quality_limit_s else row
    if kind == "step":
        return time_training(model, size, plan.rows, size.train_len, timer)
    if kind == "decode":
        return time_decode(model, size, int(value), size.train_len, timer)
    if reason := _slower(plan, model, kind, int(value)):
        return {"reason": reason}
    if kind == "prefill":
        return time_prefill(model, size, int(value), timer)
    return time_training(model, size, 1, int(value), timer)


def _slower(plan: Plan, model: str, kind: str, length: int) -> str | None:
    """Why a length need not be tried: a shorter one was not possible already."""
    for shorter in (other for other in plan.lengths if other < length):
        path = cell_path(plan.output, model, f"{kind}-{shorter}")
        reason = json.loads(path.read_text("utf-8")).get("reason") if path.exists() else None
        if reason and reason != LATE:
            return str(reason) if reason.startswith("at ") else f"at {shorter} tokens: {reason}"
    return None


def _facts(plan: Plan, model: str) -> Row:
    """Parameters, the bytes of a carried state by the context it is for, and operations."""
    size = SIZES[plan.size]
    config = config_of(model, size, size.train_len)
    states: dict[str, Any] = {}
    for length in plan.lengths:
        with torch.device("meta"):
            states[str(length)] = NsmModel(config_of(model, size, length)).state_spec.num_bytes
    facts = {
        "label": ENTRIES[model].label,
        "layer_pattern": config.layer_pattern,
        "mlp_hidden": config.mlp_hidden,
        "parameters": count_parameters(config),
        "state_bytes": states,
    }
    return facts | count_model(model, size)
