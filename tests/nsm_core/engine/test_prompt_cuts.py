"""Where prompts are cut so that a log is read with the bits that its tokens had."""

from __future__ import annotations

from nsm_core.engine.prompt_cuts import cuts_of


def test_sampled_tokens_are_read_one_by_one_and_texts_apart() -> None:
    assert cuts_of(10, ((3, 5), (8, 8)), unit=4) == (3, 4, 5, 8, 10)


def test_a_token_beyond_whole_units_is_always_a_step_of_its_own() -> None:
    assert cuts_of(9, (), unit=4) == (8, 9)
    assert cuts_of(10, (), unit=4) == (10,)
    assert cuts_of(7, ((2, 2),), unit=4) == (2, 6, 7)
    assert cuts_of(1, (), unit=4) == (1,)


def test_where_any_cut_gives_the_same_bits_only_those_wanted_are_made() -> None:
    assert cuts_of(9, ((2, 4),), wanted=(6, 3), unit=1) == (3, 6)


def test_spans_beyond_the_text_are_left_out() -> None:
    assert cuts_of(4, ((2, 3), (5, 7)), unit=4) == (2, 3, 4)
