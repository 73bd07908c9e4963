"""Steps of the native kernels with several threads, by wall time: `python -m benchmarks.native_threads`.

A table, then one line of JSON: tokens a second of steps with their logits, and of reading a prompt, for each number of
threads, by turns. The best of the repeats counts, since other programs on the machine only make one slower; for steps
that nothing interrupts put `chrt --fifo 5` before the command.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.about import about_this_run
from nsm_core.execution.base import Executor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import load_checkpoint
from nsm_core.rwkv7.loader import load_rwkv7

PAUSE_S = 0.2  # between two measurements: at real-time priority others wait for them


def factory(args: argparse.Namespace) -> Callable[..., Executor]:
    """Of executors that share the packed weights."""
    if args.rwkv7 is not None:
        rwkv7 = load_rwkv7(args.rwkv7).model
        return partial(Rwkv7Executor, rwkv7, weights=Rwkv7Weights(rwkv7, args.precision))
    model = load_checkpoint(find_checkpoint(args.model)).model
    weights = NativeWeights(model, precision=args.precision)
    return partial(NativeExecutor, model, weights=weights, half_states=args.fp16_states)


def open_executors(args: argparse.Namespace) -> dict[int, Executor]:
    """By number of threads; all rows at the start of a text."""
    new_executor, executors = factory(args), {}
    for threads in args.threads:
        executor = new_executor(num_rows=max(args.rows), num_threads=threads)
        for row in range(max(args.rows)):
            executor.pool.lease(row)
            executor.pool.write(row, executor.initial)
        executors[threads] = executor
    return executors


def step_of(executor: Executor, num_rows: int) -> None:
    rows = list(range(num_rows))
    executor.logits(executor.step(rows, rows))


def read_of(executor: Executor, num_tokens: int) -> None:
    executor.read((0,), (list(range(num_tokens)),))


def best_rates(
    work: Callable[[Executor, int], None], executors: dict[int, Executor], number: int, args: Any
) -> dict[int, float]:
    """Tokens a second, by number of threads; about `args.tokens` of them at a time."""
    times, calls = max(1, args.tokens // number), dict.fromkeys(executors, float("inf"))
    for _ in range(args.repeats):
        for threads, executor in executors.items():
            work(executor, number)
            started = time.perf_counter()
            for _ in range(times):
                work(executor, number)
            calls[threads] = min(calls[threads], (time.perf_counter() - started) / times)
            time.sleep(PAUSE_S)
    return {threads: number / seconds for threads, seconds in calls.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("pulse-books-keyed"), help="model directory or name")
    parser.add_argument("--rwkv7", type=Path, help="an RWKV-7 file or directory in its place")
    parser.add_argument("--precision", type=Precision, choices=(Precision.INT8, Precision.INT4), default=Precision.INT4)
    parser.add_argument("--fp16-states", action="store_true", help="running states in fp16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="that decode at once")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of one")
    parser.add_argument("--tokens", type=int, default=128, help="of a measurement, about")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    executors, rates = open_executors(args), {}
    first = args.threads[0]
    print(f"{args.precision} on {variants()[0]}: tokens/s" + "".join(f"{f'{n} threads':>18}" for n in args.threads))
    works = [(f"decode {rows}", step_of, rows) for rows in args.rows] + [
        (f"prompt {args.prompt}", read_of, args.prompt)
    ]
    for name, work, number in works:
        rates[name] = best_rates(work, executors, number, args)
        shown = (f"{rate:,.0f} ({rate / rates[name][first]:.2f}x)" for rate in rates[name].values())
        print(f"{name:<22}" + "".join(f"{text:>18}" for text in shown), flush=True)
    result = {**about_this_run(), "variant": variants()[0], "precision": args.precision, "tokens_per_s": rates}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
