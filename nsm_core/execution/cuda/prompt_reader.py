"""Reads prompts into rows of a pool, in batches of a few sizes. Their launches are recorded as CUDA graphs: a short
prompt does not pay for each of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.cuda.recording import record
from nsm_core.model.nsm import SUPER_CHUNK_LEN, NsmModel
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State
from nsm_core.state.to_device import copy_to_device, to_device

# Recorded numbers of tokens and rows. A prompt is padded to the next size, which does not change its bits.
LENGTHS = (64, 128, 256, 512, 1024, 2048)
ROWS = (1, 2, 4, 8, 16, 32, 128)
FEW_ROWS = 32  # more are recorded if they are a quarter of the pool at most: each needs memory for some states more
# More prompts, up to so long, than a graph has rows are read by several: other batches would make launches of their
# own, and compile kernels for their shapes while others wait.
LONGEST_IN_PARTS = 256
FILLED = 0.75  # of the largest graph's rows: fewer prompts are read by smaller ones
MAX_RECORDED_TOKENS = 16384  # with padding; beyond it the device takes longer than Python's launches
# Recording a size takes as long as reading ten prompts without; those who wait for its first ones do not wait for it.
UNRECORDED_USES = 2
# Tokens of one call, over all rows: more keep the device busy, and take memory.
PREFILL_TOKENS = 16 * SUPER_CHUNK_LEN


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    """What R rows read: rows of the pool [R], lengths [R] and ids [R,T], int64, all of them parts of `given`."""

    given: Tensor
    rows: Tensor
    lengths: Tensor
    ids: Tensor


@dataclasses.dataclass(slots=True)
class _Batch:
    """A size of a batch. `read` takes states from the pool's rows and leaves new ones there, and hidden [R,T,d].
    `graph`: of its launches, once they are recorded; `num_uses`: before.
    """

    inputs: _Inputs
    hidden: Tensor
    read: Callable[[], None]
    graph: torch.cuda.CUDAGraph | None = None
    num_uses: int = 0


class PromptReader:
    """Reads the prompts of one executor. `graphs`: record launches; else every kernel is launched each time."""

    def __init__(self, model: NsmModel, pool: StatePool, device: torch.device, *, graphs: bool) -> None:
        """`model`: as `prompt_model` makes it."""
        self._model, self._pool, self._device = model, pool, device
        self._rows = tuple(number for number in ROWS if number <= max(FEW_ROWS, pool.num_rows // 4))
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._memory: Any = None  # the graphs' memory pool; torch names no type for it
        self._hidden = torch.empty(0)  # shared by all graphs, to save memory
        self._last_use: torch.cuda.Event | None = None
        if graphs:
            with torch.cuda.device(device):
                self._memory = torch.cuda.graph_pool_handle()
                self._last_use = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._make_hidden()

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Row rows[i] reads all of ids[i]: hidden [len(ids[i]), d] of each."""
        length = next((length for length in LENGTHS if length >= max(map(len, ids))), None)
        parts = [] if self._memory is None or length is None else _parts(len(rows), length, self._rows)
        if length is None or not parts:
            return self._read_at_once(rows, ids)
        hidden: list[Tensor] = []
        for num_rows, number in parts:
            part = slice(len(hidden), len(hidden) + number)
            hidden += self._replay((num_rows, length), rows[part], ids[part])
        return hidden

    def record_next(self) -> bool:
        """Records a size that was not recorded yet, short prompts first. False: there is none."""
        if self._memory is None:
            return False
        left = [size for size in _sizes(self._rows) if self._batch(size).graph is None]
        if left:
            self._record(min(left, key=lambda size: (size[1], size[0])))
        return len(left) > 1

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Every kernel of `read`, as few times as that takes; no row is touched."""
        if not len(self._hidden):
            self._make_hidden()
        for num_rows, length in _sizes((*self._rows[:2], *self._rows[-2:])):
            self._read_given(_inputs(num_rows, length, self._device), self._hidden_of(num_rows, length))

    def _make_hidden(self) -> None:
        self._hidden = torch.empty(MAX_RECORDED_TOKENS, self._model.config.d_model, device=self._device)

    def _hidden_of(self, num_rows: int, length: int) -> Tensor:
        """[R,T,d]."""
        return self._hidden[: num_rows * length].view(num_rows, length, -1)

    def _read_at_once(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Reads one right-padded batch; the caller splits rows of very different lengths."""
        lengths = [len(row) for row in ids]
        piece_len = max(1, PREFILL_TOKENS // SUPER_CHUNK_LEN // len(rows)) * SUPER_CHUNK_LEN
        is_ragged = min(lengths) < max(lengths)
        hidden, state = self._model.forward(
            self._padded(ids, len(rows), max(lengths)),
            self._pool.gather(rows),
            to_device(np.array(lengths, np.int64), self._device) if is_ragged else None,
            piece_len=piece_len,
        )
        self._pool.scatter(rows, state)
        return [hidden[index, :length].float() for index, length in enumerate(lengths)]

    def _replay(self, size: tuple[int, int], rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        batch = self._batch(size)
        if batch.graph is None and batch.num_uses >= UNRECORDED_USES:
            self._record(size)
        batch.num_uses += 1
        if self._last_use is not None:  # on another stream: its results are still being copied
            torch.cuda.current_stream(self._device).wait_event(self._last_use)
        copy_to_device(_given(size, rows, ids), batch.inputs.given)
        if batch.graph is None:
            batch.read()
        else:
            batch.graph.replay()
        hidden = batch.hidden[: len(rows)].clone()
        if self._last_use is not None:
            self._last_use.record(torch.cuda.current_stream(self._device))
        return [hidden[index, : len(row)] for index, row in enumerate(ids)]

    def _batch(self, size: tuple[int, int]) -> _Batch:
        if size not in self._batches:
            inputs, hidden = _inputs(*size, self._device), self._hidden_of(*size)
            self._batches[size] = _Batch(inputs, hidden, functools.partial(self._read_rows, inputs, hidden))
        return self._batches[size]

    @torch.inference_mode()
    def _record(self, size: tuple[int, int]) -> None:
        """Of no row but the first, which may be in use: it reads nothing here, and what that rounds is restored."""
        batch, held = self._batch(size), self._pool.tensors
        batch.inputs.given.zero_()
        before = {name: rows[:1].clone() for name, rows in held.items()}
        try:
            batch.graph = record(batch.read, self._device, memory=self._memory)
        finally:
            for name, rows in held.items():
                rows[:1].copy_(before[name])

    def _read_rows(self, inputs: _Inputs, hidden: Tensor) -> None:
        """Of the pool, in place."""
        new_states = self._read_given(inputs, hidden)
        for name, held in self._pool.tensors.items():
            held.index_copy_(0, inputs.rows, new_states[name].to(held.dtype))

    def _read_given(self, inputs: _Inputs, hidden: Tensor) -> State:
        """Writes hidden vectors, and returns new states."""
        valid = torch.arange(inputs.ids.shape[1], device=self._device) < inputs.lengths[:, None]
        new_hidden, new_states = self._model.read(
            inputs.ids, self._states_of(inputs.rows), lengths=inputs.lengths, valid=valid
        )
        hidden.copy_(new_hidden)
        return new_states

    def _states_of(self, rows: Tensor) -> State:
        """rows [R] int64 of the pool."""
        held = self._pool.tensors
        return {spec.name: held[spec.name].index_select(0, rows).to(spec.dtype) for spec in self._pool.spec.tensors}

    def _padded(self, ids: Sequence[Sequence[int]], num_rows: int, length: int) -> Tensor:
        """[num_rows, length] int64, padded with zeros."""
        padded = np.zeros((num_rows, length), np.int64)
        for index, row in enumerate(ids):
            padded[index, : len(row)] = row
        return to_device(padded, self._device)


def _parts(number: int, length: int, rows: Sequence[int]) -> list[tuple[int, int]]:
    """The rows of each graph that reads some of the prompts, and how many; empty if graphs would not pay."""
    sizes, parts = [num_rows for num_rows in rows if num_rows * length <= MAX_RECORDED_TOKENS], list[tuple[int, int]]()
    while number:
        index = next((index for index, num_rows in enumerate(sizes) if num_rows >= number), len(sizes) - 1)
        if sizes[index] > 2 * sizes[index - 1] and number < FILLED * sizes[index]:
            index -= 1
        parts.append((sizes[index], min(sizes[index], number)))
        number -= parts[-1][1]
    return parts if len(parts) == 1 or length <= LONGEST_IN_PARTS else []


def _inputs(num_rows: int, length: int, device: torch.device) -> _Inputs:
    """Of rows that read nothing."""
    even = _even(num_rows)
    given = torch.zeros(2 * even + num_rows * length, dtype=torch.int64, device=device)
    return _Inputs(given, given[:num_rows], given[even:][:num_rows], given[2 * even :].view(num_rows, length))


def _given(size: tuple[int, int], rows: Sequence[int], ids: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """`_Inputs.given`. Padding reads the last prompt once more: its row gets the same bits again."""
    (num_rows, length), number, even = size, len(rows), _even(size[0])
    given = np.zeros(2 * even + num_rows * length, np.int64)
    of_rows, lengths, of_ids = given[:num_rows], given[even:][:num_rows], given[2 * even :].reshape(num_rows, length)
    of_rows[:number], lengths[:number] = rows, [len(row) for row in ids]
    for index, row in enumerate(ids):
        of_ids[index, : len(row)] = row
    for values in (of_rows, lengths, of_ids):
        values[number:] = values[number - 1]
    return given


def _even(number: int) -> int:
    """So that all addresses are multiples of 16 bytes: others make other programs."""
    return number + number % 2


def _sizes(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows and tokens of graphs with so many rows."""
    return ((number, length) for number in numbers for length in LENGTHS if number * length <= MAX_RECORDED_TOKENS)
