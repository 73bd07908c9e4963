"""What a row held before it read drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION


class NativeSavepoint:
    """See Executor.savepoint. Slots and tails are copied whole; of the rings of windows, what will be written over."""

    def __init__(self, pool: StatePool, row: int, num_tokens: int) -> None:
        pool.check_leased((row,))
        position = int(pool.tensors[POSITION][row])
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._places: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, tensor in pool.tensors.items():
            held = tensor[row]
            if name.endswith(".kv"):  # [kv_heads, 2, window, K]
                places = torch.arange(position, position + num_tokens) % held.shape[2]
                self._places.append((held, places, held.index_select(2, places)))
            else:
                self._whole.append((held, held.clone()))

    def restore(self) -> None:
        for held, copy in self._whole:
            held.copy_(copy)
        for held, places, copy in self._places:
            held.index_copy_(2, places, copy)
