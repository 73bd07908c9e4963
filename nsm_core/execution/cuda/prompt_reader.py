"""Reads prompts into rows of a pool, by CUDA graphs of a few sizes: a short prompt does not pay for each launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsm_core.execution.cuda.recording import record
from nsm_core.model.nsm import SUPER_CHUNK_LEN, NsmModel
from nsm_core.sampling.device import to_device
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State

# Recorded numbers of tokens and rows. A prompt is padded to the next size, which does not change its bits.
LENGTHS = (64, 128, 256, 512, 1024, 2048)
ROWS = (1, 2, 4, 8, 16, 32)
# Of more short prompts than a graph has rows, so many rows are read at a time: other batches would make launches of
# their own, and compile kernels for their shapes while others wait.
LONGEST_IN_PARTS = 256
MAX_RECORDED_TOKENS = 16384  # with padding; beyond it the device takes longer than Python's launches
# Tokens of one call, over all rows: more keep the device busy, and take memory.
PREFILL_TOKENS = 16 * SUPER_CHUNK_LEN


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """Inputs, besides the states: ids [R,T] and lengths [R]. Output: hidden [R,T,d]."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    lengths: Tensor
    hidden: Tensor


class PromptReader:
    """Reads the prompts of one executor. `graphs`: record launches; else every kernel is launched each time."""

    def __init__(self, model: NsmModel, pool: StatePool, device: torch.device, *, graphs: bool) -> None:
        """`model`: as `prompt_model` makes it."""
        self._model, self._pool, self._device = model, pool, device
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._memory: Any = None  # the graphs' memory pool; torch names no type for it
        # shared by all graphs, to save memory: states before and after, hidden vectors
        self._states: State = {}
        self._hidden = torch.empty(0)
        self._last_use: torch.cuda.Event | None = None
        if graphs:
            with torch.cuda.device(device):
                self._memory = torch.cuda.graph_pool_handle()
                self._last_use = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._make_buffers()

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Row rows[i] reads all of ids[i]: hidden [len(ids[i]), d] of each."""
        size = self._size(rows, ids)
        if size is not None:
            return self._replay(size, rows, ids)
        if self._memory is None or len(rows) <= ROWS[-1] or max(map(len, ids)) > LONGEST_IN_PARTS:
            return self._read_at_once(rows, ids)
        parts = [slice(at, at + ROWS[-1]) for at in range(0, len(rows), ROWS[-1])]
        return [hidden for part in parts for hidden in self.read(rows[part], ids[part])]

    def record_all(self) -> None:
        """Records every size now, not at its first use."""
        for num_rows, length in _sizes(ROWS):
            if self._memory is not None:
                self._record(num_rows, length)

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Every kernel of `read`, as few times as that takes; no row is touched."""
        if not self._states:
            self._make_buffers()
        for num_rows, length in _sizes((*ROWS[:2], ROWS[-1])):
            self._reading(*self._inputs(num_rows, length))()

    def _make_buffers(self) -> None:
        self._states = self._pool.spec.zeros(ROWS[-1], self._device)
        self._hidden = torch.empty(MAX_RECORDED_TOKENS, self._model.config.d_model, device=self._device)

    def _size(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Rows and tokens of the graph to replay; None if none would pay."""
        length = next((length for length in LENGTHS if length >= max(map(len, ids))), None)
        number = next((number for number in ROWS if number >= len(rows)), None)
        if self._memory is None or length is None or number is None or number * length > MAX_RECORDED_TOKENS:
            return None
        return number, length

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
        recorded = self._recorded.get(size) or self._record(*size)
        stream, number = torch.cuda.current_stream(self._device), len(rows)
        if self._last_use is not None:
            stream.wait_event(self._last_use)  # on another stream: its results are still being copied
        lengths = [len(row) for row in ids]
        recorded.ids.copy_(self._padded(ids, *size))
        recorded.lengths.copy_(to_device(np.array([*lengths, *[0] * (size[0] - number)], np.int64), self._device))
        for name, value in self._pool.gather(rows).items():
            self._states[name][:number].copy_(value)
        recorded.graph.replay()
        self._pool.scatter(rows, {name: value[:number] for name, value in self._states.items()})
        hidden = [recorded.hidden[index, :length].clone() for index, length in enumerate(lengths)]
        if self._last_use is not None:
            self._last_use.record(stream)
        return hidden

    @torch.inference_mode()
    def _record(self, num_rows: int, length: int) -> _Recorded:
        ids, lengths, hidden = self._inputs(num_rows, length)
        graph = record(self._reading(ids, lengths, hidden), self._device, memory=self._memory)
        self._recorded[num_rows, length] = _Recorded(graph, ids, lengths, hidden)
        return self._recorded[num_rows, length]

    def _inputs(self, num_rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids [R,T] and lengths [R], which are zero; hidden [R,T,d]."""
        ids = torch.zeros(num_rows, length, dtype=torch.int64, device=self._device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        return ids, lengths, self._hidden[: num_rows * length].view(num_rows, length, -1)

    def _reading(self, ids: Tensor, lengths: Tensor, hidden: Tensor) -> Callable[[], None]:
        """Reads the ids on top of the shared states, and writes hidden vectors and new states."""
        num_rows, length = ids.shape
        states = {name: value[:num_rows] for name, value in self._states.items()}

        def read() -> None:
            valid = torch.arange(length, device=self._device) < lengths[:, None]
            new_hidden, new_states = self._model.read(ids, states, lengths=lengths, valid=valid)
            hidden.copy_(new_hidden)
            for name, state in states.items():
                state.copy_(new_states[name])

        return read

    def _padded(self, ids: Sequence[Sequence[int]], num_rows: int, length: int) -> Tensor:
        """[num_rows, length] int64, padded with zeros."""
        padded = np.zeros((num_rows, length), np.int64)
        for index, row in enumerate(ids):
            padded[index, : len(row)] = row
        return to_device(padded, self._device)


def _sizes(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows and tokens of graphs with so many rows."""
    return ((number, length) for number in numbers for length in LENGTHS if number * length <= MAX_RECORDED_TOKENS)
