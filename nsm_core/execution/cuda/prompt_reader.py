"""Prompts into rows of a pool, recorded for a few sizes: a short one does not cost a launch for each of its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsm_core.execution.cuda.recording import record
from nsm_core.model.nsm import SUPER_CHUNK_LEN, NsmModel
from nsm_core.sampling.device import to_device
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State

# Tokens and rows that are recorded: what is read is padded to the next ones, which changes no bit of it.
LENGTHS = (64, 128, 256, 512, 1024, 2048)
ROWS = (1, 2, 4, 8, 16, 32)
MAX_RECORDED_TOKENS = 16384  # padding included; with more, the device works longer than Python launches
# Tokens that are read at a time, over all rows: more keep the device busy, and take memory.
PREFILL_TOKENS = 16 * SUPER_CHUNK_LEN


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """ids [R,T] and lengths [R] are what it reads beside the states. It leaves hidden [R,T,d]."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    lengths: Tensor
    hidden: Tensor


class PromptReader:
    """The prompts of one executor. `graphs`: record; without, every kernel is launched anew."""

    def __init__(self, model: NsmModel, pool: StatePool, device: torch.device, *, graphs: bool) -> None:
        """`model`: as `prompt_model` makes it."""
        self._model, self._pool, self._device = model, pool, device
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._memory: Any = None  # what graphs share; torch names no type for it
        # what all graphs share, so that none keeps memory of its own: states before and after, hidden vectors
        self._states: State = {}
        self._hidden = torch.empty(0)
        self._last_use: torch.cuda.Event | None = None
        if graphs:
            with torch.cuda.device(device):
                self._memory = torch.cuda.graph_pool_handle()
                self._last_use = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._states = pool.spec.zeros(ROWS[-1], device)
            self._hidden = torch.empty(MAX_RECORDED_TOKENS, model.config.d_model, device=device)

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Row rows[i] reads all of ids[i]: hidden [len(ids[i]), d] of each."""
        size = self._size(rows, ids)
        if size is None:
            return self._read_at_once(rows, ids)
        return self._replay(size, rows, ids)

    def record_all(self) -> None:
        """Every size now, not when it first comes."""
        for num_rows in ROWS:
            for length in LENGTHS:
                if num_rows * length <= MAX_RECORDED_TOKENS and self._memory is not None:
                    self._record(num_rows, length)

    def _size(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Rows and tokens of the graph to replay; None where none would pay."""
        length = next((length for length in LENGTHS if length >= max(map(len, ids))), None)
        number = next((number for number in ROWS if number >= len(rows)), None)
        if self._memory is None or length is None or number is None or number * length > MAX_RECORDED_TOKENS:
            return None
        return number, length

    def _read_at_once(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """One right-padded batch: rows of very different lengths are better read by several calls."""
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
            stream.wait_event(self._last_use)  # on another stream: what it left is still being taken
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
        ids = torch.zeros(num_rows, length, dtype=torch.int64, device=self._device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        states = {name: value[:num_rows] for name, value in self._states.items()}
        hidden = self._hidden[: num_rows * length].view(num_rows, length, -1)

        def read() -> None:
            valid = torch.arange(length, device=self._device) < lengths[:, None]
            new_hidden, new_states = self._model.read(ids, states, lengths=lengths, valid=valid)
            hidden.copy_(new_hidden)
            for name, state in states.items():
                state.copy_(new_states[name])

        graph = record(read, self._device, memory=self._memory)
        self._recorded[num_rows, length] = _Recorded(graph, ids, lengths, hidden)
        return self._recorded[num_rows, length]

    def _padded(self, ids: Sequence[Sequence[int]], num_rows: int, length: int) -> Tensor:
        """[num_rows, length] int64, zeros where there is no token."""
        padded = np.zeros((num_rows, length), np.int64)
        for index, row in enumerate(ids):
            padded[index, : len(row)] = row
        return to_device(padded, self._device)
