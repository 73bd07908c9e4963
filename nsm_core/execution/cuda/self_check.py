"""A check of freshly compiled kernels on their device, before they serve requests."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaWeights
from nsm_core.model.nsm import NsmModel

NUM_TOKENS = 2
PROMPT_LENGTHS = (100, 70, 5)
REPEATS = 3
# Relative error of logits against the eager fp32 model; some twenty times the observed errors
TOLERANCE = {CudaWeights.BF16: 0.06, CudaWeights.FP16: 0.01, CudaWeights.FP32: 1e-4}


@torch.inference_mode()
def failed_check(executor: CudaExecutor, model: NsmModel) -> str | None:
    """Reads a few tokens and prompts in rows of the pool, none of which may be leased. None if the check passes.

    A row must have the same bits beside others and alone, every time, and be close to the eager model.
    """
    return _failed_steps(executor, model) or _failed_prompts(executor, model)


def _failed_steps(executor: CudaExecutor, model: NsmModel) -> str | None:
    num_rows = executor.pool.num_rows
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (NUM_TOKENS, num_rows), generator=generator)
    some = sorted({0, num_rows // 2, num_rows - 1})
    batches = [_logits(executor, list(range(num_rows)), ids) for _ in range(REPEATS)]
    for row in some:
        alone = _logits(executor, [row], ids[:, row : row + 1])
        if not all(batch[row].equal(alone[0]) for batch in batches):
            return f"row {row} of {num_rows} has other bits than alone, or at another time"
    want, state = torch.empty(0), model.initial_state(len(some))
    for token in ids[:, some].to(batches[0].device):
        hidden, state = model.step(token, state)
        want = model.logits(hidden)
    return _failed_tolerance(executor, batches[0][some], want, "logits")


def _failed_prompts(executor: CudaExecutor, model: NsmModel) -> str | None:
    generator, device = torch.Generator().manual_seed(1), model.embedding.weight.device
    lengths = PROMPT_LENGTHS[: executor.pool.num_rows]
    texts = [torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    beside = _read(executor, texts)
    for text, hidden in zip(texts, beside, strict=True):
        # without a GPU the scan over slots goes through the library, whose sums depend on shapes
        if device.type == "cuda" and not hidden.equal(_read(executor, [text])[0]):
            return f"a prompt of {len(text)} tokens has other bits than alone"
    want, _ = model.forward(torch.tensor(texts[:1], device=device), model.initial_state(1))
    return _failed_tolerance(executor, executor.logits(beside[0]), model.logits(want[0]), "logits of a prompt")


def _failed_tolerance(executor: CudaExecutor, got: Tensor, want: Tensor, subject: str) -> str | None:
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    tolerance = TOLERANCE[executor.options.weights]
    return None if error <= tolerance else f"{subject} are off by {error:.2g}, {tolerance:g} is allowed"


def _read(executor: CudaExecutor, texts: list[list[int]]) -> list[Tensor]:
    """Reads texts from the start, one a row: hidden [length,d] of each. Frees the rows."""
    rows = list(range(len(texts)))
    _lease(executor, rows)
    try:
        return executor.read(rows, texts)
    finally:
        _free(executor, rows)


def _lease(executor: CudaExecutor, rows: list[int]) -> None:
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)


def _free(executor: CudaExecutor, rows: list[int]) -> None:
    for row in rows:
        executor.pool.free(row)


def _logits(executor: CudaExecutor, rows: list[int], ids: Tensor) -> Tensor:
    """ids [tokens, len(rows)], read from the start; logits [len(rows), V] after the last. Frees the rows."""
    _lease(executor, rows)
    try:
        for token in ids.tolist():
            hidden = executor.step(rows, token)
        return executor.logits(hidden)
    finally:
        _free(executor, rows)
