"""Ragged prefill: every chunk once, padding within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.scheduler import MAX_PADDING_SHARE, MAX_PADDING_TOKENS, Chunk, group_by_length, num_padding_tokens


def make_chunks(*lengths: int) -> list[Chunk]:
    return [Chunk(slot, 0, length) for slot, length in enumerate(lengths)]


def lengths_of(chunks: list[Chunk]) -> list[list[int]]:
    return [[chunk.length for chunk in group] for group in group_by_length(chunks)]


def test_similar_lengths_share_a_batch_in_slot_order() -> None:
    assert lengths_of(make_chunks(60, 64, 50)) == [[60, 64, 50]]


def test_a_long_prompt_does_not_pad_short_ones() -> None:
    assert lengths_of(make_chunks(5, 200, 7)) == [[200], [5, 7]]


def test_lengths_that_are_padded_to_one_multiple_share_a_batch() -> None:
    chunks = make_chunks(5, 60, 33)
    assert lengths_of(chunks) == [[60, 33], [5]]
    assert group_by_length(chunks, unit=64) == [tuple(chunks)]


def test_no_chunks_no_batches() -> None:
    assert group_by_length([]) == []


@given(st.lists(st.integers(2, 500), max_size=16))
def test_every_chunk_is_read_once_and_padding_is_bounded(lengths: list[int]) -> None:
    chunks = make_chunks(*lengths)
    groups = group_by_length(chunks)
    assert sorted((chunk for group in groups for chunk in group), key=lambda chunk: chunk.slot) == chunks
    for group in groups:
        num_real = sum(chunk.length for chunk in group)
        assert num_padding_tokens([chunk.length for chunk in group]) <= max(
            MAX_PADDING_TOKENS, MAX_PADDING_SHARE * num_real
        )
