"""The eager executor: the model's own operations, on any device. The reference for every other executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsm_core.execution.base import DecodeRounds, Overlap, PrepareMore, SequenceModel, TakeSavepoint
from nsm_core.sampling.masks import mask_reference
from nsm_core.sampling.sampler import draw_reference
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State


class EagerExecutor:
    """Reads states out of the pool, calls the functional model, writes the new states back (see Executor)."""

    def __init__(self, model: SequenceModel, *, num_rows: int, poison: bool = False) -> None:
        self._model = model
        with torch.inference_mode():
            self.initial: State = model.initial_state(1)
        self._device = next(iter(self.initial.values())).device
        self.pool = StatePool(model.state_spec, num_rows, self._device, poison=poison)

    draw = staticmethod(draw_reference)
    mask = staticmethod(mask_reference)
    prompt_unit = 1  # products of other shapes round differently
    reads_ragged = False
    savepoint: TakeSavepoint | None = None  # for the same reason
    decode_rounds: DecodeRounds | None = None
    overlap: Overlap | None = None  # the CPU computes in the calling thread
    prepare_more: PrepareMore | None = None

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        hidden, state = self._model.step(self._tensor(ids), self.pool.gather(rows))
        self.pool.scatter(rows, state)
        return hidden

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Reads one right-padded batch; the caller splits rows of very different lengths."""
        longest = max(len(row) for row in ids)
        padded = self._tensor([[*row, *[0] * (longest - len(row))] for row in ids])
        is_ragged = any(len(row) < longest for row in ids)
        lengths = self._tensor([len(row) for row in ids]) if is_ragged else None
        hidden, state = self._model.forward(padded, self.pool.gather(rows), lengths)
        self.pool.scatter(rows, state)
        return [hidden[index, : len(row)] for index, row in enumerate(ids)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
