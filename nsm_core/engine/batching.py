"""Which pieces of prompts are read together. Plain Python: no torch here."""

from __future__ import annotations

from collections.abc import Sequence

from nsm_core.engine.scheduler import Chunk

# A batch pays for padding; a further call of the model pays for its many small operations. Up to this much padding, or
# this share of the batch's real tokens, is cheaper than a call.
MAX_PADDING_TOKENS = 32
MAX_PADDING_SHARE = 0.25


def group_by_length(chunks: Sequence[Chunk]) -> list[tuple[Chunk, ...]]:
    """Splits chunks into right-padded batches, longest chunk first, none with more padding than the limits allow."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.length, chunk.slot)):
        if groups and _is_padding_bounded([*groups[-1], chunk]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [tuple(sorted(group, key=lambda chunk: chunk.slot)) for group in groups]


def num_padding_tokens(group: Sequence[Chunk]) -> int:
    """Tokens of padding when the chunks are one batch."""
    return max(chunk.length for chunk in group) * len(group) - sum(chunk.length for chunk in group)


def _is_padding_bounded(group: Sequence[Chunk]) -> bool:
    num_real = sum(chunk.length for chunk in group)
    return num_padding_tokens(group) <= max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * num_real)
