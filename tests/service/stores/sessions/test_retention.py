from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.stores.sessions.retention import SPARED_TOKENS, KeptSnapshot, gap_factor, plan_kept


def at(version: int, position: int) -> KeptSnapshot:
    return KeptSnapshot(version=version, position=position, num_bytes=1)


def positions_after(turns: list[int], max_kept: int) -> list[tuple[int, ...]]:
    """What is kept after each of the turns, by position."""
    kept: list[KeptSnapshot] = []
    newest: KeptSnapshot | None = None
    position, history = 0, []
    for version, num_tokens in enumerate(turns, start=1):
        position += num_tokens
        versions = plan_kept(kept, newest, position=position, max_kept=max_kept)
        known = {one.version: one for one in (*kept, *(() if newest is None else (newest,)))}
        kept = [known[number] for number in versions]
        newest = at(version, position)
        history.append(tuple(one.position for one in kept))
    return history


lengths = st.lists(st.integers(1, 40) | st.integers(1, 3_000), min_size=1, max_size=120)


@given(lengths, st.integers(0, 8))
def test_never_more_than_asked_for_in_rising_order_and_before_the_head(turns: list[int], max_kept: int) -> None:
    head = 0
    for num_tokens, kept in zip(turns, positions_after(turns, max_kept), strict=True):
        head += num_tokens
        assert len(kept) <= max_kept
        assert list(kept) == sorted(set(kept))
        assert all(0 < position < head for position in kept)


@given(lengths, st.integers(1, 8))
def test_no_gap_is_longer_than_its_distance_allows(turns: list[int], max_kept: int) -> None:
    ends = [sum(turns[: index + 1]) for index in range(len(turns))]
    for head, kept in zip(ends, positions_after(turns, max_kept), strict=True):
        places = (0, *kept, head)
        factor = gap_factor(head, max_kept)
        for before, after in itertools.pairwise(places):
            is_one_turn = not any(before < end < after for end in ends)
            allowed = max(SPARED_TOKENS, factor * (head - after + SPARED_TOKENS))
            assert is_one_turn or after - before <= allowed * (1 + 1e-9)


@given(lengths, st.integers(1, 8))
def test_each_one_kept_spares_some_reading(turns: list[int], max_kept: int) -> None:
    kept = positions_after(turns, max_kept)[-1]
    places = (0, *kept, sum(turns))
    assert all(after - before > SPARED_TOKENS for before, after in zip(places, places[2:], strict=False))


def test_a_long_conversation_of_short_turns_keeps_them_at_growing_distances() -> None:
    kept = positions_after([80] * 1_000, max_kept=4)[-1]
    distances = [80_000 - position for position in reversed(kept)]
    assert len(distances) == 4
    assert distances[0] < 1_000
    assert all(2 * near < far for near, far in itertools.pairwise(distances))


def test_what_a_head_has_not_moved_on_from_is_not_kept() -> None:
    assert plan_kept([at(1, 500)], at(2, 1_000), position=1_000, max_kept=4) == (1,)


def test_none_are_kept_when_none_are_wanted() -> None:
    assert plan_kept([at(1, 500)], at(2, 1_000), position=2_000, max_kept=0) == ()
