"""Which tokens constrained rows may have, as bits, and their effect on logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

WORD_BITS = 32
ALL_ALLOWED = np.int32(-1)
# Bits set in each 16-bit number: numpy.bitwise_count needs numpy 2, and Triton's environment has numpy 1.
_BITS_SET = np.unpackbits(np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(
    axis=1, dtype=np.uint8
)

Logits = npt.NDArray[np.float32]


def num_bits_set(words: npt.NDArray[np.int32] | npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Words [..., W], contiguous -> the number of bits set in all W together, [...]."""
    counts: npt.NDArray[np.int64] = _BITS_SET[words.view(np.uint16)].sum(axis=-1, dtype=np.int64)
    return counts


@dataclasses.dataclass(frozen=True, slots=True)
class TokenMasks:
    """indices [R] int64, rising: rows of a batch's logits. words [R, W] int32: bit i of word w allows token 32 w + i;
    tokens beyond the last word are not allowed.
    """

    indices: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]

    def forced_ids(self) -> npt.NDArray[np.int64]:
        """[R]: the only token that a row allows, or -1 for a row that allows several."""
        counts = num_bits_set(self.words)
        ids = np.full(len(self.words), -1, np.int64)
        rows = np.flatnonzero(counts == 1)
        at = (self.words[rows] != 0).argmax(axis=1)
        bits = self.words.view(np.uint32)[rows, at]
        ids[rows] = at * WORD_BITS + num_bits_set((bits - np.uint32(1))[:, None])
        return ids

    def dense(self, num_rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
        """[num_rows, ceil(vocab_size / 32)]: a mask for each row of the logits; those that have none allow every
        token.
        """
        words = np.full((num_rows, -(-vocab_size // WORD_BITS)), ALL_ALLOWED, np.int32)
        words[self.indices] = 0
        words[self.indices, : self.words.shape[1]] = self.words
        return words

    def of_rows(self, chosen: npt.NDArray[np.bool_]) -> TokenMasks:
        """Those of `chosen` [R]."""
        return TokenMasks(self.indices[chosen], self.words[chosen])

    def within(self, rows: Sequence[int]) -> TokenMasks:
        """The masks for logits[rows]; `rows` rise."""
        of_rows = np.asarray(rows, np.int64)
        own = np.isin(self.indices, of_rows)
        return TokenMasks(np.searchsorted(of_rows, self.indices[own]), self.words[own])


class MaskLogits(Protocol):
    """Makes tokens impossible. `mask_reference` is its specification."""

    def __call__(self, logits: Logits, masks: TokenMasks) -> None:
        """logits [B, V] contiguous, changed in place: those of tokens that are not allowed become minus infinity."""
        ...


def mask_reference(logits: Logits, masks: TokenMasks) -> None:
    """A `MaskLogits` in numpy, on any machine."""
    vocab_size = logits.shape[1]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    for index, allowed in zip(masks.indices.tolist(), bits, strict=True):
        logits[index, : len(allowed)][~allowed] = -np.inf
        logits[index, len(allowed) :] = -np.inf
