"""The masks of a step: which ids its constrained rows may have, for all rows and drafts at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import GrammarFailed
from nsm_core.grammars.matcher import MaskWords, failure_of, fill_masks, mask_width
from nsm_core.sampling.masks import ALL_ALLOWED, TokenMasks, num_bits_set


class Constraints:
    """The running requests that may not have every token. A SlotListener: steps without any of them ask once."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def open(self, slot: int, sequence: RunningSequence) -> None:
        if sequence.params.is_constrained:
            self._slots.add(slot)

    def close(self, slot: int) -> None:
        self._slots.discard(slot)

    def masks(
        self, slots: Sequence[int], sequences: Mapping[int, RunningSequence], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[TokenMasks | None, dict[int, GrammarFailed]]:
        """For logits with 1 + len(drafts[slot]) rows for each of `slots`, in order; None when every id is allowed.

        The second value has the slots whose grammar gave up: their rows must not be used.
        """
        if not self._slots:
            return None, {}
        failed: dict[int, GrammarFailed] = {}
        starts: list[tuple[int, int]] = []  # slot, row of the logits
        row = 0
        for slot in slots:
            if slot in self._slots and sequences[slot].is_constrained:
                starts.append((slot, row))
            row += 1 + len(drafts.get(slot, ()))
        if not starts:
            return None, {}
        indices = [row + offset for slot, row in starts for offset in range(1 + len(drafts.get(slot, ())))]
        width = mask_width(sequences[starts[0][0]].vocab_size)
        words = np.full((len(indices), width), ALL_ALLOWED, np.int32)
        self._fill(words, starts, sequences, drafts, failed)
        return TokenMasks(np.array(indices, np.int64), words), failed

    @staticmethod
    def _fill(
        words: MaskWords,
        starts: Sequence[tuple[int, int]],
        sequences: Mapping[int, RunningSequence],
        drafts: Mapping[int, Sequence[int]],
        failed: dict[int, GrammarFailed],
    ) -> None:
        positions, begin = [], 0
        for slot, _ in starts:
            sequence, of_slot = sequences[slot], drafts.get(slot, ())
            if sequence.matcher is not None:
                positions.append((sequence.matcher, begin, of_slot))
            begin += 1 + len(of_slot)
        if positions:
            fill_masks(words, positions)
        # a matcher that has failed allows the end of the text, or nothing
        num_allowed: list[int] = num_bits_set(words).tolist()
        begin = 0
        for slot, _ in starts:
            sequence, number = sequences[slot], 1 + len(drafts.get(slot, ()))
            for offset in range(min(number, sequence.params.min_tokens - len(sequence.sampled))):
                _forbid_end(words[begin + offset], sequence)
            matcher = sequence.matcher
            num = num_allowed[begin]
            if matcher is not None and num <= 1 and (num == 0 or matcher.inner.is_error()):
                failed[slot] = failure_of(matcher)
            begin += number


def _forbid_end(row: MaskWords, sequence: RunningSequence) -> None:
    """Before `min_tokens` no end is allowed, unless the grammar allows nothing else."""
    before = row.copy()
    for token_id in sequence.output.end_ids:
        row.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if not row.any():
        row[:] = before
