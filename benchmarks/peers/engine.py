"""Our engine in this process, on one thread: what `benchmarks.peers.llama` measures, in the same figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine import Bench
from benchmarks.native_kernels import open_executor
from benchmarks.peers.figures import RWKV7_KERNELS, Figures
from nsm_core.execution.base import Executor
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.model.loader import load_checkpoint
from nsm_core.rwkv7.loader import load_rwkv7

TOKEN_BUDGET = 256  # the engine's default


def cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


class Ours:
    """A bundled model behind the whole engine: scheduler, sampler and what becomes of tokens are in its figures."""

    def __init__(self, name: str, executor_name: ExecutorName, model: Path, *, max_batch: int) -> None:
        self.name = name
        loaded = load_checkpoint(model)
        executor = choose_executor(loaded, executor_name)
        self.about = {"model": loaded.name, "executor": executor.name, "numerics": executor.numerics}
        self._bench = Bench(loaded, executor, max_slots=max_batch, token_budget=TOKEN_BUDGET)
        self._bench.run([self._bench.ids(64)], max_tokens=8)  # pages and caches

    def decode_and_prefill(self, *, batches: Sequence[int], num_tokens: int, lengths: Sequence[int]) -> Figures:
        """Tokens per CPU second from an empty context (one token each), and of prompts."""
        figures: Figures = {}
        for batch in batches:
            prompts = [self._bench.ids(1) for _ in range(batch)]
            spent = cpu_s(lambda prompts=prompts: self._bench.run(prompts, max_tokens=num_tokens))  # type: ignore[misc]
            figures[f"decode.{batch}.tokens_per_cpu_s"] = batch * num_tokens / spent
        for length in lengths:
            prompt = self._bench.ids(length)
            spent = cpu_s(lambda prompt=prompt: self._bench.run([prompt], max_tokens=1))  # type: ignore[misc]
            figures[f"prefill.{length}.tokens_per_cpu_s"] = length / spent
        return figures

    def context(self, *, length: int, num_tokens: int) -> Figures:
        """Decoding after a text of `length` tokens, alone."""
        resume, token = self._bench.resume_of(length), self._bench.ids(1)
        spent = cpu_s(lambda: self._bench.run([token], max_tokens=num_tokens, resume=resume))
        return {f"context.{length}.tokens_per_cpu_s": num_tokens / spent}


class OurKernels:
    """Steps and logits alone, without an engine around them: as little as `llama-batched-bench` does.

    `executor`: with rows that are leased.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self.name = name
        self._executor = executor

    def decode_and_prefill(self, *, batches: Sequence[int], num_tokens: int, lengths: Sequence[int]) -> Figures:
        figures = {
            f"decode.{batch}.tokens_per_cpu_s": batch * num_tokens / self._decode(batch, num_tokens)
            for batch in batches
        }
        return figures | {f"prefill.{length}.tokens_per_cpu_s": length / self._read(length) for length in lengths}

    def _decode(self, batch: int, num_tokens: int) -> float:
        executor, rows = self._executor, list(range(batch))

        def run() -> None:
            for token in range(num_tokens):
                executor.logits(executor.step(rows, [row + token for row in rows]))

        self._reset(rows)
        return cpu_s(run)

    def _read(self, length: int) -> float:
        self._reset([0])
        ids = [token % 8192 for token in range(length)]
        return cpu_s(lambda: self._executor.logits(self._executor.read((0,), (ids,))[0][-1:]))

    def _reset(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._executor.pool.write(row, self._executor.initial)


def bundled_kernels(name: str, precision: Precision, model: Path, *, max_batch: int) -> OurKernels:
    """Raises RuntimeError where the kernels were not built."""
    _require_kernels()
    return OurKernels(name, open_executor(variants()[0], max_batch, precision, model))


def rwkv7_kernels(file: Path, *, max_batch: int) -> OurKernels:
    """Of an RWKV-7 model in int8. Raises RuntimeError where the kernels were not built, CheckpointError."""
    _require_kernels()
    model = load_rwkv7(file).model
    executor = Rwkv7Executor(model, num_rows=max_batch, weights=Rwkv7Weights(model, Precision.INT8))
    for row in range(max_batch):
        executor.pool.lease(row)
    return OurKernels(RWKV7_KERNELS, executor)


def _require_kernels() -> None:
    if not variants():
        raise RuntimeError("the native kernels were not built: python -m nsm_core.execution.native.build")
