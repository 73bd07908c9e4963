"""What one core of this machine can do, measured in the same run: reading memory, int8 products; and our share."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable

import torch

from benchmarks.cpu_time import cpu_times
from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.native_kernels import SHAPES, matrix_executor, open_executor
from benchmarks.peers.figures import Figures
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.model.loader import load_checkpoint

BATCH = 32
LARGE_TOKENS = 256  # of a product that is bound by arithmetic
LARGE_BYTES = 256 * 2**20  # far more than the caches


def measure_ceilings(*, repeats: int) -> Figures:
    """`ceiling.1`, GB/s: a plain sum over memory; what a step at batch 1 reads. `ceiling.32`, GOP/s: the fastest int8
    product here, fbgemm's or ours; our products alone at 32 tokens; those of whole steps, by the time of all.
    """
    executor = open_executor(variants()[0], BATCH)
    num_int8, step_bytes = step_size(executor)
    memory = LARGE_BYTES * 1e-9 / min(cpu_times(torch.ones(LARGE_BYTES // 4).sum, repeats))
    step = step_bytes * 1e-9 / statistics.median(cpu_times(lambda: step_of(executor, 1), 10 * repeats))
    products = our_gops(SHAPES, BATCH, repeats)
    large = max(fbgemm_gops(repeats), our_gops(SHAPES[:1], LARGE_TOKENS, repeats), products)
    steps = 2e-9 * num_int8 * BATCH / statistics.median(cpu_times(lambda: step_of(executor, BATCH), repeats))
    return {
        "ceiling.1.memory_gb_per_s": memory,
        "ceiling.1.step_gb_per_s": step,
        "ceiling.1.share": step / memory,
        "ceiling.32.large_gops": large,
        "ceiling.32.products_gops": products,
        "ceiling.32.products_share": products / large,
        "ceiling.32.step_gops": steps,
        "ceiling.32.share": steps / large,
    }


def step_size(executor: NativeExecutor) -> tuple[int, int]:
    """Numbers in pulse-books' int8 matrices; bytes of weights and of one row's slots that a step reads."""
    matrices = {
        name: parameter.numel()
        for name, parameter in load_checkpoint(MEASURED_MODEL).model.named_parameters()
        if parameter.dim() == 2 and "conv" not in name
    }
    routers = sum(size for name, size in matrices.items() if "router" in name)
    slots = sum(tensor[0].numel() * 4 for name, tensor in executor.pool.tensors.items() if name.endswith("slots"))
    num_int8 = sum(matrices.values()) - routers
    return num_int8, num_int8 + 2 * routers + slots


def step_of(executor: NativeExecutor, batch: int) -> None:
    rows = list(range(batch))
    executor.logits(executor.step(rows, rows))


def our_gops(shapes: Iterable[tuple[int, int]], num_tokens: int, repeats: int) -> float:
    """Of products with matrices of these shapes, one after the other; quantising the tokens included."""
    operations = seconds = 0.0
    for rows, cols in shapes:
        executor, hidden = matrix_executor(rows, cols, variants()[0]), torch.randn(num_tokens, cols)
        seconds += min(cpu_times(lambda x=executor, h=hidden: x.logits(h), repeats))  # type: ignore[misc]
        operations += 2.0 * rows * cols * num_tokens
    return operations * 1e-9 / seconds


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
