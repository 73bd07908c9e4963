"""What one core of this machine can do, measured in the same run: reading memory, int8 products; and our share."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.cpu_time import cpu_times
from benchmarks.native_kernels import SHAPES, matrix_executor, open_executor
from benchmarks.peers.figures import Figures
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.weights import packed_matrices
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel

BATCH = 32
LARGE_TOKENS = 256  # of a product that is bound by arithmetic
LARGE_BYTES = 256 * 2**20  # far more than the caches


def measure_ceilings(path: Path, *, repeats: int) -> Figures:
    """Of the model at `path` in int8.

    `ceiling.1`, GB/s: a plain sum over memory; what a step at batch 1 reads. `ceiling.32`, GOP/s: the fastest int8
    product here, fbgemm's or ours; the step's products alone; those of whole steps, by the time of all. `time_share`:
    of a step's time, what its products take alone.
    """
    path = find_checkpoint(path)
    model, executor = load_checkpoint(path).model, open_executor(variants()[0], BATCH, path=path)
    shapes = Counter((weight.shape[0], weight.shape[1]) for _, _, weight in packed_matrices(model).values())
    num_int8 = sum(rows * cols * count for (rows, cols), count in shapes.items())
    memory = LARGE_BYTES * 1e-9 / min(cpu_times(torch.ones(LARGE_BYTES // 4).sum, repeats))
    step = step_bytes(model, executor) * 1e-9
    step /= statistics.median(cpu_times(lambda: step_of(executor, 1), 10 * repeats))
    products_s = products_seconds(shapes, BATCH, repeats)
    products = 2e-9 * num_int8 * BATCH / products_s
    one = 2e-9 * SHAPES[0][0] * SHAPES[0][1] * LARGE_TOKENS
    large = max(fbgemm_gops(repeats), one / products_seconds({SHAPES[0]: 1}, LARGE_TOKENS, repeats), products)
    step_s = statistics.median(cpu_times(lambda: step_of(executor, BATCH), repeats))
    steps = 2e-9 * num_int8 * BATCH / step_s
    return {
        "ceiling.1.memory_gb_per_s": memory,
        "ceiling.1.step_gb_per_s": step,
        "ceiling.1.share": step / memory,
        "ceiling.32.large_gops": large,
        "ceiling.32.products_gops": products,
        "ceiling.32.products_share": products / large,
        "ceiling.32.step_gops": steps,
        "ceiling.32.share": steps / large,
        "ceiling.32.time_share": products_s / step_s,
    }


def step_bytes(model: NsmModel, executor: NativeExecutor) -> int:
    """Of weights and of one row's slots that a step reads: int8 matrices, fp16 ones beside them, fp32 slots."""
    packed = packed_matrices(model)
    halves = sum(
        2 * parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and name not in packed and "conv" not in name
    )
    slots = sum(tensor[0].numel() * 4 for name, tensor in executor.pool.tensors.items() if name.endswith("slots"))
    return sum(weight.numel() for _, _, weight in packed.values()) + halves + slots


def step_of(executor: NativeExecutor, batch: int) -> None:
    rows = list(range(batch))
    executor.logits(executor.step(rows, rows))


def products_seconds(shapes: Mapping[tuple[int, int], int], num_tokens: int, repeats: int) -> float:
    """Of products with so many matrices of each shape, one after the other; quantising the tokens included."""
    seconds = 0.0
    for (rows, cols), count in shapes.items():
        executor, hidden = matrix_executor(rows, cols, variants()[0]), torch.randn(num_tokens, cols)
        seconds += count * min(cpu_times(lambda x=executor, h=hidden: x.logits(h), repeats))  # type: ignore[misc]
    return seconds


def fbgemm_gops(repeats: int) -> float:
    """The same product by PyTorch's own library, where it has one for this processor; else 0."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return 0.0
    rows, cols = SHAPES[0]
    scales, zeros = torch.full((rows,), 1e-3), torch.zeros(rows, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a future release will have no such tensors
        matrix = torch.quantize_per_channel(torch.randn(rows, cols) * 0.02, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(matrix, None)
        hidden = torch.randn(LARGE_TOKENS, cols)
        seconds = min(cpu_times(lambda: torch.ops.quantized.linear_dynamic(hidden, packed), repeats))
    return 2e-9 * rows * cols * LARGE_TOKENS / seconds
