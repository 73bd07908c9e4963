"""Overlap on a GPU: steps that are launched while the ones before still run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import NextInputs, Rounds
from nsm_core.execution.cuda.decode import NO_ROW
from nsm_core.execution.cuda.kernels.overlap import resolve_inputs
from nsm_core.execution.cuda.rounds import RecordedRounds, Steps
from nsm_core.sampling.device import PendingTokens
from nsm_core.state.pool import StatePool
from nsm_core.state.to_device import copy_to_device, to_device

MIN_ROWS = 32  # `python -m benchmarks.gpu_ahead`: slower below, by a tenth at one row


class RecordedSteps(Steps, Protocol):
    """The recorded steps of an executor, by size."""

    @property
    def pool(self) -> StatePool: ...

    def inputs(self, num_rows: int) -> Tensor:
        """[2, B] int64, B >= num_rows: rows of the pool, and ids, of the next replayed step."""
        ...

    def replay(self, num_rows: int) -> Tensor:
        """Launches the step whose inputs were written: hidden [num_rows, d]."""
        ...


class CudaOverlap:
    """See Overlap. Host data lies in pinned memory: copies of pageable memory wait for the device."""

    def __init__(self, steps: RecordedSteps, vocab_size: int, device: torch.device, *, graphs: bool) -> None:
        """`graphs`: see CudaOptions."""
        self._steps, self._device = steps, device
        self.min_rows = MIN_ROWS
        self._pauses = torch.zeros(steps.pool.num_rows, vocab_size, dtype=torch.uint8, device=device)
        self._pausing: dict[int, frozenset[int]] = {}  # by row, as `_pauses` has them
        self.rounds: RecordedRounds | None = RecordedRounds(steps, self._pauses, device, graphs=graphs)
        self._no_ids = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def launch(self) -> None:
        """The kernels of `step` and `decode` that are not the executor's, on rows of padding."""
        given, (rows, ids) = torch.full((3, 2), NO_ROW, device=self._device), torch.zeros_like(self._no_ids)
        with torch.cuda.device_of(given):  # type: ignore[no-untyped-call]
            resolve_inputs(given=given, sampled=self._no_ids, pauses=self._pauses, rows=rows, ids=ids, no_row=NO_ROW)
        if self.rounds is not None:
            self.rounds.launch_all()

    @torch.inference_mode()
    def pause_at(self, row: int, ids: Collection[int]) -> None:
        wanted = frozenset(ids)
        if self._pausing.get(row, frozenset()) == wanted:
            return  # most requests end with the same ids
        self._pausing[row] = wanted
        pauses = np.zeros(self._pauses.shape[1], np.uint8)
        given = np.fromiter(ids, np.int64, len(ids))
        pauses[given[given < len(pauses)]] = 1  # a tokenizer may have more ids than the model
        copy_to_device(pauses, self._pauses[row])

    @torch.inference_mode()
    def step(self, rows: Sequence[int], inputs: NextInputs) -> Tensor:
        self._steps.pool.check_leased(rows)
        most = self._steps.largest_batch
        parts = [
            self._step_once(
                rows[at : at + most],
                inputs.ids[at : at + most],
                inputs.sources[at : at + most],
                inputs.sampled,
            )
            for at in range(0, len(rows), most)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def most_rounds(self, num_rows: int) -> int:
        return 0 if self.rounds is None else self.rounds.most_rounds(num_rows)

    @torch.inference_mode()
    def decode(self, rows: Sequence[int], inputs: NextInputs, rounds: Rounds) -> PendingTokens:
        if self.rounds is None:
            raise RuntimeError("this executor launches single steps")
        self._steps.pool.check_leased(rows)
        to = self._steps.inputs_of(self._steps.bucket(len(rows)))
        self._resolve(rows, inputs.ids, inputs.sources, inputs.sampled, to)
        return self.rounds.launch(len(rows), rounds)

    def side_stream(self) -> AbstractContextManager[object]:
        """A separate stream. It does not wait, so steps that touched the rows must have been waited for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _step_once(
        self,
        rows: Sequence[int],
        ids: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        sampled: Tensor | None,
    ) -> Tensor:
        self._resolve(rows, ids, sources, sampled, self._steps.inputs(len(rows)))
        return self._steps.replay(len(rows))

    def _resolve(
        self,
        rows: Sequence[int],
        ids: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        sampled: Tensor | None,
        inputs: Tensor,
    ) -> None:
        """Writes `inputs` [2, B] of the next step: see NextInputs."""
        num_rows = len(rows)
        given = np.zeros((3, inputs.shape[1]), np.int64)
        given[0, :num_rows], given[0, num_rows:] = rows, NO_ROW
        given[1, :num_rows] = ids
        given[2, :num_rows], given[2, num_rows:] = sources, -1
        with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
            resolve_inputs(
                given=to_device(given, self._device),
                sampled=self._no_ids if sampled is None else sampled,
                pauses=self._pauses,
                rows=inputs[0],
                ids=inputs[1],
                no_row=NO_ROW,
            )
