"""Drafts from the text itself, and how many of them are tried."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.speculation import (
    GRAM_LENGTH,
    MAX_DRAFTS,
    MAX_PAUSE_TOKENS,
    MIN_DRAFTS,
    MIN_PAUSE_TOKENS,
    WINDOW_TOKENS,
    DraftPace,
    NgramDrafter,
)


def drafter_of(*parts: list[int]) -> NgramDrafter:
    drafter = NgramDrafter()
    for part in parts:
        drafter.extend(part)
    return drafter


def propose_by_search(ids: list[int], num_tokens: int) -> list[int]:
    """The same, by a search through the whole text."""
    for start in range(len(ids) - 1, GRAM_LENGTH - 1, -1):
        if ids[start - GRAM_LENGTH : start] == ids[-GRAM_LENGTH:]:
            return list(itertools.islice(itertools.cycle(ids[start : start + num_tokens]), num_tokens))
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9), st.data())
def test_drafts_are_the_tokens_after_the_last_occurrence_of_the_gram(
    ids: list[int], num_tokens: int, data: st.DataObject
) -> None:
    """In whatever pieces the text came."""
    cut = data.draw(st.integers(0, len(ids)))
    assert drafter_of(ids[:cut], ids[cut:]).propose(num_tokens) == propose_by_search(ids, num_tokens)


def test_draft_of_a_loop_repeats_its_period() -> None:
    assert drafter_of([9, 1, 2, 3, 1, 2, 3, 1, 2]).propose(8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert drafter_of([5, 5, 5, 5, 5]).propose(3) == [5, 5, 5]


@pytest.mark.parametrize("ids", [[], [1], [1, 1, 1, 1], [1, 2, 3, 4, 5, 1, 2, 3]], ids=str)
def test_draft_without_repetition_is_empty(ids: list[int]) -> None:
    assert drafter_of(ids).propose(4) == []


def test_memory_is_bounded_and_the_newest_text_stays() -> None:
    drafter = NgramDrafter()
    for start in range(0, 10 * WINDOW_TOKENS, 100):
        drafter.extend(list(range(start, start + 100)))
        assert len(drafter._ids) <= 2 * WINDOW_TOKENS
        assert len(drafter._next_index) <= 2 * WINDOW_TOKENS
    newest = 10 * WINDOW_TOKENS - 1000
    drafter.extend(list(range(newest, newest + GRAM_LENGTH)))
    assert drafter.propose(2) == [newest + GRAM_LENGTH, newest + GRAM_LENGTH + 1]
    drafter.extend(list(range(GRAM_LENGTH)))
    assert drafter.propose(2) == []  # long forgotten


def test_draft_of_a_very_long_prompt_searches_its_end() -> None:
    drafter = drafter_of([*range(3 * WINDOW_TOKENS), *range(3 * WINDOW_TOKENS - 900, 3 * WINDOW_TOKENS - 700)])
    assert drafter.propose(1) == [3 * WINDOW_TOKENS - 700]


def test_more_is_drafted_while_it_comes_true() -> None:
    pace, numbers = DraftPace(), []
    for _ in range(4):
        numbers.append(pace.num_drafts(0))
        pace.record(num_drafted=numbers[-1], num_accepted=numbers[-1], num_sampled=0)
    assert numbers == [MIN_DRAFTS, 2 * MIN_DRAFTS, MAX_DRAFTS, MAX_DRAFTS]
    pace.record(num_drafted=MAX_DRAFTS, num_accepted=3, num_sampled=0)
    assert pace.num_drafts(0) == 3


def test_a_text_that_never_repeats_itself_pays_for_few_drafts() -> None:
    """Whatever is proposed is refused: pauses grow, so that of 10,000 tokens a hundredth is drafted for nothing."""
    pace, num_drafted = DraftPace(), 0
    pauses, last = [], 0
    for num_sampled in range(1, 10_000):
        drafts = pace.num_drafts(num_sampled)
        if drafts:
            pauses.append(num_sampled - last)
            last = num_sampled
            num_drafted += drafts
            pace.record(num_drafted=drafts, num_accepted=0, num_sampled=num_sampled)
    assert num_drafted < 100
    assert MIN_PAUSE_TOKENS in pauses
    assert max(pauses) == MAX_PAUSE_TOKENS


def test_a_text_that_begins_to_repeat_itself_is_found_again() -> None:
    pace = DraftPace()
    for num_sampled in (1, 2, 3):
        pace.record(num_drafted=2, num_accepted=0, num_sampled=num_sampled)
    assert pace.num_drafts(4) == 0
    at = MAX_PAUSE_TOKENS
    for _ in range(6):
        pace.record(num_drafted=pace.num_drafts(at), num_accepted=pace.num_drafts(at), num_sampled=at)
    assert pace.num_drafts(at) == MAX_DRAFTS
    while pace.num_drafts(at):
        pace.record(num_drafted=2, num_accepted=0, num_sampled=at)
    assert pace.num_drafts(at + MIN_PAUSE_TOKENS) == MIN_DRAFTS  # the first pause of a text that had been good
