"""What the slots of one step have read, as hidden vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Hidden:
    """By slot. Slots of one token stay rows of one tensor: a step may have hundreds of them."""

    def __init__(self, slots: Sequence[int] = (), rows: Tensor | None = None) -> None:
        """rows [len(slots),d]: after the one token of each of `slots`."""
        self._slots, self._rows = list(slots), rows
        self._chunks: dict[int, Tensor] = {}

    def add(self, slots: Sequence[int], chunks: Sequence[Tensor]) -> None:
        """chunks[i] [length,d] belongs to slots[i]."""
        self._chunks.update(zip(slots, chunks, strict=True))

    def chunk(self, slot: int) -> Tensor:
        """[length,d]."""
        if self._rows is None or slot in self._chunks:
            return self._chunks[slot]
        index = self._slots.index(slot)
        return self._rows[index : index + 1]

    def last(self, slots: Sequence[int]) -> Tensor:
        """[len(slots),d]: after each slot's last token. Fast where those of one token come first, in their order."""
        num_rows = len(self._slots)
        if self._rows is None or slots[:num_rows] != self._slots:
            return torch.cat([self.chunk(slot)[-1:] for slot in slots])
        if len(slots) == num_rows:
            return self._rows
        return torch.cat([self._rows, *(self._chunks[slot][-1:] for slot in slots[num_rows:])])

    def tails(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[sum of lengths,d]: after each of a slot's last tokens."""
        return torch.cat([self.chunk(slot)[-length:] for slot, length in zip(slots, lengths, strict=True)])
