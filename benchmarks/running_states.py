"""Running states in fp32 and fp16 on the native kernels: `python -m benchmarks.running_states`. A table, then JSON.

Models and states take turns, so that a busy machine slows all of them; tokens per CPU second, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
from nsm_core.state.spec import POSITION
from nsm_lab.provenance import command_line, source_commit

MODELS = ("pulse-books", "pulse-books-keyed")
LATE = 5000  # tokens of a text whose windows are full
Subject = tuple[str, bool]


def open_executors(models: list[str], num_rows: int) -> dict[Subject, NativeExecutor]:
    executors = {}
    for name in models:
        model = load_checkpoint(CHECKPOINTS / name).model
        weights = NativeWeights(model)
        for half_states in (False, True):
            executor = NativeExecutor(model, num_rows=num_rows, weights=weights, half_states=half_states)
            for row in range(num_rows):
                executor.pool.lease(row)
                executor.pool.write(row, executor.initial)
            executors[name, half_states] = executor
    return executors


def by_turns(
    executors: dict[Subject, NativeExecutor], work: Callable[[NativeExecutor], int], repeats: int
) -> dict[Subject, float]:
    """Tokens per CPU second, the median; `work` returns its tokens. One round is not counted."""
    rates: dict[Subject, list[float]] = {subject: [] for subject in executors}
    for _ in range(repeats + 1):
        for subject, executor in executors.items():
            started = time.process_time()
            num_tokens = work(executor)
            rates[subject].append(num_tokens / (time.process_time() - started))
    return {subject: statistics.median(found[1:]) for subject, found in rates.items()}


def decode(executor: NativeExecutor, batch: int, position: int) -> int:
    rows = list(range(batch))
    executor.pool.tensors[POSITION].fill_(position)
    executor.logits(executor.step(rows, rows))
    return batch


def read(executor: NativeExecutor, length: int) -> int:
    executor.pool.write(0, executor.initial)
    executor.read((0,), (list(range(length)),))
    return length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    executors = open_executors(args.models, max(args.batches))
    works: dict[str, tuple[Callable[[NativeExecutor], int], int]] = {}
    for batch in args.batches:
        for position in (0, LATE):
            works[f"decode {batch}, token {position}"] = (
                lambda executor, b=batch, p=position: decode(executor, b, p),  # type: ignore[misc]
                args.repeats,
            )
    for length in args.lengths:
        works[f"prompt of {length}"] = (lambda executor, n=length: read(executor, n), 3)  # type: ignore[misc]
    names = [f"{name} fp{16 if half else 32}" for name, half in executors]
    print(f"$ {command_line()}\n{'tokens per CPU second':<24}" + "".join(f"{name:>25}" for name in names))
    rows = []
    for label, (work, repeats) in works.items():
        rates = by_turns(executors, work, repeats)
        print(f"{label:<24}" + "".join(f"{rate:>25.0f}" for rate in rates.values()), flush=True)
        rows.append({"work": label, **dict(zip(names, rates.values(), strict=True))})
    sizes = {name: executor.pool.num_bytes for name, executor in zip(names, executors.values(), strict=True)}
    print(f"{'bytes of a running state':<24}" + "".join(f"{size // max(args.batches):>25}" for size in sizes.values()))
    print(json.dumps({"commit": source_commit(), "pool_bytes": sizes, "num_rows": max(args.batches), "rows": rows}))


if __name__ == "__main__":
    main()
