"""Presets beside each other on the native CPU kernels: `python -m benchmarks.native_presets hybrid keyed-hybrid`.

Models have random weights. A table of tokens per CPU second, each preset's speed relative to the first one's, and the
bytes of a state; then one line of JSON. The presets are measured by turns, so that a busy neighbour meets them all;
ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION
from nsm_lab.provenance import source_commit
from nsm_lab.training.presets import PRESETS

TOKENS_A_TURN = 32  # about, of a decode step that is timed
# Tokens before a step: none, and more than any window of the presets holds
CONTEXTS = {"at the start": 0, "at token 5,000": 5000}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """`work` processes `tokens`, `repeats` times in one measurement."""

    name: str
    tokens: int
    repeats: int
    work: Callable[[NativeExecutor], object]


def open_executor(preset: str, variant: str, num_rows: int) -> NativeExecutor:
    torch.manual_seed(0)
    model = NsmModel(PRESETS[preset]).requires_grad_(False)
    executor = NativeExecutor(model, num_rows=num_rows, weights=NativeWeights(model, variant))
    for row in range(num_rows):
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)
    return executor


def decode_case(batch: int, context: str) -> Case:
    rows = list(range(batch))

    def step(executor: NativeExecutor) -> None:
        executor.pool.tensors[POSITION].fill_(CONTEXTS[context])
        executor.logits(executor.step(rows, rows))

    return Case(f"decode, {batch} rows, {context}", batch, max(1, TOKENS_A_TURN // batch), step)


def reading_case(length: int) -> Case:
    ids = list(range(length))

    def read(executor: NativeExecutor) -> None:
        executor.pool.write(0, executor.initial)
        executor.read((0,), (ids,))

    return Case(f"prompt of {length} tokens", length, 1, read)


def tokens_per_cpu_s(case: Case, executor: NativeExecutor) -> float:
    """Once more before, so that the last preset's numbers leave the cache."""
    case.work(executor)
    started = time.process_time()
    for _ in range(case.repeats):
        case.work(executor)
    return case.tokens * case.repeats / (time.process_time() - started)


def measure(case: Case, executors: Mapping[str, NativeExecutor], turns: int) -> dict[str, object]:
    speeds = [{name: tokens_per_cpu_s(case, executor) for name, executor in executors.items()} for _ in range(turns)]
    first = next(iter(executors))
    medians = {name: statistics.median(turn[name] for turn in speeds) for name in executors}
    ratios = {name: statistics.median(turn[name] / turn[first] for turn in speeds) for name in executors}
    print(f"{case.name:<36}" + "".join(f"{medians[name]:>11.0f} {ratios[name]:>5.2f}x" for name in executors))
    return {"case": case.name, "tokens_per_cpu_s": medians, "relative": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="+", choices=PRESETS)
    parser.add_argument("--variant", choices=variants(), default=variants()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    executors = {preset: open_executor(preset, args.variant, max(args.batches)) for preset in args.presets}
    state_mib = {name: executor.pool.spec.num_bytes / 2**20 for name, executor in executors.items()}
    print(f"{args.variant}, one thread, tokens per CPU second" + " " * 3 + "".join(f"{name:>18}" for name in executors))
    print(f"{'state, MiB':<36}" + "".join(f"{size:>11.2f}{'':>7}" for size in state_mib.values()))
    cases = [decode_case(batch, context) for context in CONTEXTS for batch in args.batches]
    results = [measure(case, executors, args.turns) for case in (*cases, *map(reading_case, args.lengths))]
    print(json.dumps({"commit": source_commit(), "variant": args.variant, "state_mib": state_mib, "results": results}))


if __name__ == "__main__":
    main()
