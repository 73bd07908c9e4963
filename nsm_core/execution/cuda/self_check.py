"""A check of freshly compiled kernels on their device, before they serve requests."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import Executor, NextInputs, Rounds, SequenceModel
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.overlap import CudaOverlap
from nsm_core.hashing import new_checksum
from nsm_core.sampling.device import POSITION_COLUMN, choose_on_device, pack_sampling_params
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import SKIPPED
from nsm_core.state.to_device import to_device

logger = logging.getLogger("nsm.execution")

NUM_TOKENS = 2
PROMPT_LENGTHS = (100, 70, 5)
REPEATS = 3
PAUSING_ROWS = 16
# Relative error of logits against the eager fp32 model; some twenty times the observed errors
TOLERANCE = {CudaWeights.BF16: 0.06, CudaWeights.FP16: 0.01, CudaWeights.FP32: 1e-4}


class CudaRows(Executor, Protocol):
    """An executor for GPUs of any architecture."""

    @property
    def options(self) -> CudaOptions: ...


class CudaOverlapping(CudaRows, Protocol):
    """One whose steps overlap, unless the host samples."""

    overlap: CudaOverlap | None

    @property
    def largest_batch(self) -> int: ...


def check_rounds(executor: CudaOverlapping, vocab_size: int) -> None:
    """Records rounds, which must give the tokens and states of steps. Where they fail, the executor launches single
    steps from now on, and the log says why. No row of the pool may be leased.
    """
    overlap = executor.overlap
    if overlap is None or overlap.rounds is None:
        return
    try:
        overlap.rounds.record_all()
        for rows in _rows_of_rounds(executor):
            reason = _failed_rounds(executor, overlap, rows, vocab_size)
            if reason is not None:
                break
    except Exception as error:  # of the compiler, the driver or a kernel: single steps may do all the same
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("a launch computes one token of a request, not several: %s", reason)
        overlap.rounds = None


def _rows_of_rounds(executor: CudaOverlapping) -> tuple[list[int], list[int]]:
    """As many as a launch takes, and one alone."""
    num_rows = executor.pool.num_rows
    return list(range(min(num_rows, executor.largest_batch))), [num_rows - 1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """One launch: every second row is drawn, some pause at a third of all ids, and some have one token left."""

    rows: list[int]
    ids: npt.NDArray[np.int64]
    rounds: Rounds
    pausing: Mapping[int, Collection[int]]


def _trial(executor: CudaOverlapping, overlap: CudaOverlap, rows: list[int], vocab_size: int) -> _Trial:
    number = overlap.most_rounds(len(rows))
    ids = _some_ids(vocab_size, executor.pool.num_rows)[0, rows].numpy()
    params = [SamplingParams(temperature=0.9 * (row % 2), top_p=0.9, seed=row) for row in rows]
    choices = np.frombuffer(b"".join(map(pack_sampling_params, params)), np.int64).reshape(len(rows), -1).copy()
    rounds = Rounds(choices, np.where(np.arange(len(rows)) % 3 == 2, 1, number), number)
    pausing = {row: frozenset(range(0, vocab_size, 3)) for row in rows[:PAUSING_ROWS]}
    return _Trial(rows, ids, rounds, pausing)


@torch.inference_mode()
def _failed_rounds(executor: CudaOverlapping, overlap: CudaOverlap, rows: list[int], vocab_size: int) -> str | None:
    trial = _trial(executor, overlap, rows, vocab_size)
    want, got = _in_single_steps(executor, trial), _in_rounds(executor, overlap, trial)
    if not np.array_equal(got[0], want[0]):
        return f"tokens of {len(rows)} rows differ from those of single steps"
    if got[1] != want[1]:
        return f"states of {len(rows)} rows differ from those of single steps"
    return None


@torch.inference_mode()
def _in_rounds(
    executor: CudaOverlapping, overlap: CudaOverlap, trial: _Trial
) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """Tokens [rounds, rows], and some of the states."""
    _lease(executor, trial.rows)
    try:
        for row, pausing_ids in trial.pausing.items():
            overlap.pause_at(row, pausing_ids)
        inputs = NextInputs(trial.ids, np.full(len(trial.rows), -1), None)
        tokens = overlap.decode(trial.rows, inputs, trial.rounds).wait()
        return tokens, _packed(executor, trial.rows)
    finally:
        for row in trial.pausing:
            overlap.pause_at(row, ())
        _free(executor, trial.rows)


def _in_single_steps(executor: CudaOverlapping, trial: _Trial) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """What rounds must give."""
    rows, ids, rounds, pausing = trial.rows, trial.ids, trial.rounds, trial.pausing
    tokens, last, live = np.full((rounds.number, len(rows)), SKIPPED), ids.copy(), np.arange(len(rows))
    _lease(executor, rows)
    try:
        for number in range(rounds.number):
            if not len(live):
                break
            logits = executor.logits(executor.step([rows[index] for index in live], last[live].tolist()))
            params = rounds.choices[live]
            params[:, POSITION_COLUMN] += number
            last[live] = tokens[number, live] = choose_on_device(logits, to_device(params, logits.device)).cpu().numpy()
            has_paused = np.array([last[index] in pausing.get(rows[index], ()) for index in live])
            live = live[~has_paused & (rounds.limits[live] > number + 1)]
        return tokens, _packed(executor, rows)
    finally:
        _free(executor, rows)


def _packed(executor: CudaRows, rows: list[int]) -> list[bytes]:
    return [executor.pool.pack(rows[index]) for index in _some_rows(len(rows))]


@torch.inference_mode()
def computed(executor: CudaRows, vocab_size: int) -> str:
    """Identity of the bits of steps beside others and alone, and of prompts: a part of what `failed_bits` computes."""
    num_rows = executor.pool.num_rows
    ids = _some_ids(vocab_size, num_rows)
    tensors = [_logits(executor, list(range(num_rows)), ids)]
    tensors += [_logits(executor, [row], ids[:, row : row + 1]) for row in _some_rows(num_rows)]
    tensors += read_from_start(executor, _some_texts(vocab_size, num_rows))
    found = new_checksum()
    for tensor in tensors:
        found.update(tensor.float().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def computed_in_rounds(executor: CudaOverlapping, vocab_size: int) -> str:
    """The same of rounds, which it records. Empty if the executor has none."""
    overlap = executor.overlap
    if overlap is None or overlap.rounds is None:
        return ""
    overlap.rounds.record_all()
    found = new_checksum()
    for rows in _rows_of_rounds(executor):
        tokens, states = _in_rounds(executor, overlap, _trial(executor, overlap, rows, vocab_size))
        for raw in (tokens.tobytes(), *states):
            found.update(raw)
    return found.hexdigest()


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
