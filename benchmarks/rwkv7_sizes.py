"""A step of RWKV-7 on a CPU beside reading its weights once: `python -m benchmarks.rwkv7_sizes --sizes 0.4B 1.5B`.

Random weights or those of `--model`, packed in int8, one thread. A reading is a sum over a block of memory as large as
what a step reads of matrices, made by NumPy. Steps and readings alternate; of both the median of CPU seconds, and the
ratio of each pair's, so that other programs on the machine slow both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.rwkv7_models import SIZES, RandomTensors, config_of
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.loader import load_rwkv7
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.tensors import tensor_shapes


def matrix_bytes(config: Rwkv7Config) -> int:
    """What a step reads: large matrices in int8, small ones in fp16. Of the embedding it reads one row."""
    total = 0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and name != "emb.weight":
            is_small = name[-1] in "12" or name.endswith("r_k")
            total += shape[0] * shape[1] * (2 if is_small else 1)
    return total


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def random_model(size: str) -> Rwkv7Model:
    config = config_of(size)
    return Rwkv7Model(config, RandomTensors(config))


def measure(name: str, model: Rwkv7Model, pairs: int) -> dict[str, object]:
    started = time.monotonic()
    weights = Rwkv7Weights(model, Precision.INT8)
    packed_s = time.monotonic() - started
    executor = Rwkv7Executor(model, num_rows=1, num_threads=1, weights=weights)
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    block = np.ones(matrix_bytes(model.config) // 8, np.int64)

    def step() -> None:
        executor.logits(executor.step((0,), (5,)))

    for work in (step, block.sum):
        work()
    found = [(cpu_seconds(step), cpu_seconds(block.sum)) for _ in range(pairs)]
    step_s, read_s = (statistics.median(times) for times in zip(*found, strict=True))
    return {
        "size": name,
        "bytes": block.nbytes,
        "pack_s": round(packed_s, 1),
        "step_ms": round(step_s * 1e3, 2),
        "read_ms": round(read_s * 1e3, 2),
        "read_GB_per_s": round(block.nbytes / read_s / 1e9, 2),
        "ratio": round(statistics.median(step / read for step, read in found), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.4B"])
    parser.add_argument("--model", type=Path, help="a file or directory, instead of random weights")
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"kernels": variants()[0], "torch": torch.__version__}), flush=True)
    if arguments.model is not None:
        print(json.dumps(measure(arguments.model.name, load_rwkv7(arguments.model).model, arguments.pairs)), flush=True)
        return
    for size in arguments.sizes:
        print(json.dumps(measure(size, random_model(size), arguments.pairs)), flush=True)


if __name__ == "__main__":
    main()
