"""Savepoints of the native executor: a row's state before it reads drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION


class NativeSavepoint:
    """See Executor.savepoint. Copies slots and tails whole, and of windows' rings the entries to be overwritten."""

    def __init__(self, pool: StatePool, row: int, num_tokens: int) -> None:
        pool.check_leased((row,))
        position = int(pool.tensors[POSITION][row])
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._ring_entries: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, tensor in pool.tensors.items():
            held = tensor[row]
            if name.endswith(".kv"):  # [kv_heads, 2, window, K]
                indices = torch.arange(position, position + num_tokens) % held.shape[2]
                self._ring_entries.append((held, indices, held.index_select(2, indices)))
            else:
                self._whole.append((held, held.clone()))

    def restore(self) -> None:
        for held, copy in self._whole:
            held.copy_(copy)
        for held, indices, copy in self._ring_entries:
            held.index_copy_(2, indices, copy)
