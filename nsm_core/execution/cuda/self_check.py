"""A check of freshly compiled kernels on their device, before they serve requests."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nsm_core.execution.base import Executor, SequenceModel
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights

NUM_TOKENS = 2
PROMPT_LENGTHS = (100, 70, 5)
REPEATS = 3
# Relative error of logits against the eager fp32 model; some twenty times the observed errors
TOLERANCE = {CudaWeights.BF16: 0.06, CudaWeights.FP16: 0.01, CudaWeights.FP32: 1e-4}


class CudaRows(Executor, Protocol):
    """An executor for GPUs of any architecture."""

    @property
    def options(self) -> CudaOptions: ...


@torch.inference_mode()
def failed_check(executor: CudaRows, model: SequenceModel, vocab_size: int) -> str | None:
    """Reads a few tokens and prompts in rows of the pool, none of which may be leased. None if the check passes.

    A row must have the same bits beside others and alone, every time, and be close to the eager model.
    """
    return failed_bits(executor, vocab_size) or failed_numbers(executor, model, vocab_size)


@torch.inference_mode()
def failed_bits(executor: CudaRows, vocab_size: int) -> str | None:
    """The first half: the same bits beside others and alone."""
    num_rows = executor.pool.num_rows
    ids = _some_ids(vocab_size, num_rows)
    batches = [_logits(executor, list(range(num_rows)), ids) for _ in range(REPEATS)]
    for row in _some_rows(num_rows):
        alone = _logits(executor, [row], ids[:, row : row + 1])
        if not all(batch[row].equal(alone[0]) for batch in batches):
            return f"row {row} of {num_rows} has other bits than alone, or at another time"
    texts = _some_texts(vocab_size, num_rows)
    beside = read_from_start(executor, texts)
    for text, hidden in zip(texts, beside, strict=True):
        # without a GPU some sums go through the library, where they depend on shapes
        if hidden.is_cuda and not hidden.equal(read_from_start(executor, [text])[0]):
            return f"a prompt of {len(text)} tokens has other bits than alone"
    return None


@torch.inference_mode()
def failed_numbers(executor: CudaRows, model: SequenceModel, vocab_size: int) -> str | None:
    """The second half: steps and prompts close to the model as it is written."""
    some = _some_rows(executor.pool.num_rows)
    ids = _some_ids(vocab_size, executor.pool.num_rows)[:, some]
    got, want = _logits(executor, some, ids), _reference_logits(model, ids)[-1]
    reason = _failed_tolerance(executor, got, want, "logits")
    if reason is not None:
        return reason
    text = _some_texts(vocab_size, 1)[0]
    (read,) = read_from_start(executor, [text])
    want = _reference_logits(model, torch.tensor([text]).T)[:, 0]
    return _failed_tolerance(executor, executor.logits(read), want, "logits of a prompt")


def launch_reference(model: SequenceModel) -> None:
    """The kernels of the model that `failed_check` compares with."""
    for num_rows in (1, 3):
        _reference_logits(model, torch.zeros(1, num_rows, dtype=torch.int64))


@torch.inference_mode()
def _reference_logits(model: SequenceModel, ids: Tensor) -> Tensor:
    """ids [tokens, rows], from the start -> logits [tokens, rows, V] of the model as it is written, token by token:
    `forward` has kernels of its own, which only this check would need in fp32.
    """
    logits, state = [], model.initial_state(ids.shape[1])
    for token in ids.to(next(iter(state.values())).device):
        hidden, state = model.step(token, state)
        logits.append(model.logits(hidden))
    return torch.stack(logits)


def _some_rows(num_rows: int) -> list[int]:
    return sorted({0, num_rows // 2, num_rows - 1})


def _some_ids(vocab_size: int, num_rows: int) -> Tensor:
    return torch.randint(vocab_size, (NUM_TOKENS, num_rows), generator=torch.Generator().manual_seed(0))


def _some_texts(vocab_size: int, most: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS[:most]]


def _failed_tolerance(executor: CudaRows, got: Tensor, want: Tensor, subject: str) -> str | None:
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    tolerance = TOLERANCE[executor.options.weights]
    return None if error <= tolerance else f"{subject} are off by {error:.2g}, {tolerance:g} is allowed"


def read_from_start(executor: Executor, texts: list[list[int]]) -> list[Tensor]:
    """Texts, one a row: hidden [length,d] of each. Frees the rows."""
    rows = list(range(len(texts)))
    _lease(executor, rows)
    try:
        return executor.read(rows, texts)
    finally:
        _free(executor, rows)


def _lease(executor: Executor, rows: list[int]) -> None:
    for row in rows:
        executor.pool.lease(row)
    executor.pool.fill(rows, executor.initial)


def _free(executor: Executor, rows: list[int]) -> None:
    for row in rows:
        executor.pool.free(row)


def _logits(executor: Executor, rows: list[int], ids: Tensor) -> Tensor:
    """ids [tokens, len(rows)], read from the start; logits [len(rows), V] after the last. Frees the rows."""
    _lease(executor, rows)
    try:
        for token in ids.tolist():
            hidden = executor.step(rows, token)
        return executor.logits(hidden)
    finally:
        _free(executor, rows)
