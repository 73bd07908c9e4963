"""Speed of the native CPU kernels by themselves: `python -m benchmarks.native_kernels`. Tables, then one line of JSON.

Products of matrices by number of tokens (GOP/s: two operations a weight and token), decode steps and reading of a
bundled model, and with weights in int8 how much memory a step at one token goes through. Times are medians of CPU
time, which a busy neighbour distorts less than the clock: it still shares caches and memory with this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cpu_time import cpu_times
from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import ModelConfig
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION
from nsm_lab.provenance import source_commit

# Outputs x inputs of pulse-books' matrices: slot projection, feed-forward up and down, embedding
SHAPES = ((2048, 512), (3136, 512), (512, 1568), (8192, 512))
Row = dict[str, object]
OpenRows = Callable[[int], NativeExecutor]  # of so many rows


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """The median."""
    return statistics.median(cpu_times(work, repeats))


def matrix_executor(rows: int, cols: int, variant: str, precision: Precision = Precision.INT8) -> NativeExecutor:
    """Its logits are a product with one matrix [rows, cols]."""
    config = ModelConfig(
        vocab_size=rows, d_model=cols, num_heads=cols // 32, num_layers=1, mlp_hidden=16, num_memory_slots=8
    )
    model = NsmModel(config).requires_grad_(False)
    return NativeExecutor(model, num_rows=1, weights=NativeWeights(model, variant, precision=precision))


def measure_products(variant: str, precision: Precision, batches: list[int], repeats: int) -> list[Row]:
    results: list[Row] = []
    print(f"\n{variant}: {precision} products, GOP/s by tokens at a time (quantising the tokens included)")
    print(f"{'matrix':<14}" + "".join(f"{batch:>9}" for batch in batches))
    for rows, cols in SHAPES:
        executor, rates = matrix_executor(rows, cols, variant, precision), []
        for batch in batches:
            hidden = torch.randn(batch, cols)
            seconds = cpu_seconds(lambda x=executor, h=hidden: x.logits(h), repeats)  # type: ignore[misc]
            rates.append(2e-9 * rows * cols * batch / seconds)
            results.append({"rows": rows, "cols": cols, "tokens": batch, "gops": rates[-1]})
        print(f"{rows} x {cols:<7}" + "".join(f"{rate:>9.0f}" for rate in rates))
    return results


def open_executor(
    variant: str,
    num_rows: int,
    precision: Precision = Precision.INT8,
    path: Path = MEASURED_MODEL,
    *,
    half_states: bool = False,
) -> NativeExecutor:
    model = load_checkpoint(path).model
    weights = NativeWeights(model, variant, precision=precision)
    executor = NativeExecutor(model, num_rows=num_rows, weights=weights, half_states=half_states)
    for row in range(num_rows):
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)
    return executor


def measure_steps(open_rows: OpenRows, batches: list[int], repeats: int) -> list[Row]:
    """Steps and their logits, with empty windows and with full ones."""
    executor, results = open_rows(max(batches)), []
    print("\nthe model, tokens per CPU second")
    print(f"{'decode, batch':<34}" + "".join(f"{batch:>9}" for batch in batches))
    for context, position in (("empty", 0), ("full", 5000)):
        rates = []
        for batch in batches:
            rows = list(range(batch))

            def step(rows: list[int] = rows, position: int = position) -> None:
                executor.pool.tensors[POSITION].fill_(position)
                executor.logits(executor.step(rows, rows))

            rates.append(batch / cpu_seconds(step, repeats))
            results.append({"context": context, "batch": batch, "tokens_per_cpu_s": rates[-1]})
        print(f"{f'  {context} windows':<34}" + "".join(f"{rate:>9.0f}" for rate in rates))
    return results


def measure_reading(open_rows: OpenRows, lengths: list[int], repeats: int) -> list[Row]:
    executor, results = open_rows(1), []
    print(f"{'reading, tokens':<34}" + "".join(f"{length:>9}" for length in lengths))
    for length in lengths:
        ids = list(range(length))

        def read(ids: list[int] = ids) -> None:
            executor.pool.write(0, executor.initial)
            executor.read((0,), (ids,))

        results.append({"length": length, "tokens_per_cpu_s": length / cpu_seconds(read, repeats)})
    print(f"{'  a fresh text':<34}" + "".join(f"{row['tokens_per_cpu_s']:>9.0f}" for row in results))
    return results


def measure_bandwidth(variant: str, repeats: int) -> Row:
    """GB/s that one step at batch 1 reads of weights and state, and that a sum over a large array reads."""
    executor = open_executor(variant, 1)
    config = load_checkpoint(MEASURED_MODEL).config
    matrices = sum(
        parameter.numel() * (2 if "router" in name else 1)
        for name, parameter in load_checkpoint(MEASURED_MODEL).model.named_parameters()
        if parameter.dim() == 2 and "conv" not in name
    )
    slots = sum(tensor[0].numel() * 4 for name, tensor in executor.pool.tensors.items() if name.endswith("slots"))
    seconds = cpu_seconds(lambda: executor.logits(executor.step((0,), (1,))), 10 * repeats)
    large = torch.ones(64 * 2**20)
    plain = large.numel() * 4e-9 / cpu_seconds(lambda: large.sum(), repeats)
    step = (matrices + slots) * 1e-9 / seconds
    print(
        f"\n{variant}: a step at batch 1 reads {(matrices + slots) / 1e6:.1f} MB ({config.num_layers} layers) at ",
        end="",
    )
    print(f"{step:.1f} GB/s; a sum over 256 MiB reads {plain:.1f} GB/s: {100 * step / plain:.0f} %")
    return {"step_gb_per_s": step, "sum_gb_per_s": plain}


def measure_variant(variant: str, args: argparse.Namespace) -> Row:
    def open_rows(num_rows: int) -> NativeExecutor:
        path = CHECKPOINTS / args.model
        return open_executor(variant, num_rows, args.precision, path, half_states=args.fp16_states)

    measured: Row = {
        "variant": variant,
        "products": measure_products(variant, args.precision, args.batches, args.repeats),
        "steps": measure_steps(open_rows, args.batches, args.repeats),
        "reading": measure_reading(open_rows, args.lengths, args.repeats),
    }
    if args.precision is Precision.INT8:
        measured["bandwidth"] = measure_bandwidth(variant, args.repeats)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", choices=variants(), default=[v for v in variants() if v != "portable"])
    parser.add_argument("--model", default=MEASURED_MODEL.name, help="a bundled one")
    parser.add_argument("--precision", type=Precision, choices=(Precision.INT8, Precision.INT4), default=Precision.INT8)
    parser.add_argument("--fp16-states", action="store_true", help="running states in fp16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measure_variant(variant, args) for variant in args.variants]
    print(json.dumps({"commit": source_commit(), "runs": runs}))


if __name__ == "__main__":
    main()
