from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.stores.sessions.retention import MIN_GAP_TOKENS, RetainedSnapshot, plan_retention


def at(version: int, position: int) -> RetainedSnapshot:
    return RetainedSnapshot(version=version, position=position, num_bytes=1)


def positions_after(turns: list[int], max_retained: int) -> list[tuple[int, ...]]:
    """What is retained after each of the turns, by position."""
    retained: list[RetainedSnapshot] = []
    newest: RetainedSnapshot | None = None
    position, history = 0, []
    for version, num_tokens in enumerate(turns, start=1):
        position += num_tokens
        versions = plan_retention(retained, newest, position=position, max_retained=max_retained)
        known = {one.version: one for one in (*retained, *(() if newest is None else (newest,)))}
        retained = [known[number] for number in versions]
        newest = at(version, position)
        history.append(tuple(one.position for one in retained))
    return history


lengths = st.lists(st.integers(1, 40) | st.integers(1, 3_000), min_size=1, max_size=120)


@given(lengths, st.integers(0, 8))
def test_never_more_than_asked_for_in_rising_order_and_before_the_head(turns: list[int], max_retained: int) -> None:
    head = 0
    for num_tokens, retained in zip(turns, positions_after(turns, max_retained), strict=True):
        head += num_tokens
        assert len(retained) <= max_retained
        assert list(retained) == sorted(set(retained))
        assert all(0 < position < head for position in retained)


def gap_factor(position: int, max_retained: int) -> float:
    """Most that a gap may be of its distance, for a head at `position`."""
    # Were each of the max_retained + 1 candidates to leave a larger gap, distances from the head, counted from the
    # newest candidate, would grow by more than 1 + factor with every second one, and so beyond the whole log.
    return float((position / MIN_GAP_TOKENS + 1) ** (1 / ((max_retained + 1) // 2)) - 1)


@given(lengths, st.integers(1, 8))
def test_no_gap_is_longer_than_its_distance_allows(turns: list[int], max_retained: int) -> None:
    ends = [sum(turns[: index + 1]) for index in range(len(turns))]
    for head, retained in zip(ends, positions_after(turns, max_retained), strict=True):
        positions = (0, *retained, head)
        factor = gap_factor(head, max_retained)
        for before, after in itertools.pairwise(positions):
            is_one_turn = not any(before < end < after for end in ends)
            allowed = max(MIN_GAP_TOKENS, factor * (head - after + MIN_GAP_TOKENS))
            assert is_one_turn or after - before <= allowed * (1 + 1e-9)


@given(lengths, st.integers(1, 8))
def test_each_one_kept_spares_some_reading(turns: list[int], max_retained: int) -> None:
    retained = positions_after(turns, max_retained)[-1]
    positions = (0, *retained, sum(turns))
    assert all(after - before > MIN_GAP_TOKENS for before, after in zip(positions, positions[2:], strict=False))


def test_a_long_conversation_of_short_turns_keeps_them_at_growing_distances() -> None:
    retained = positions_after([80] * 1_000, max_retained=4)[-1]
    distances = [80_000 - position for position in reversed(retained)]
    assert len(distances) == 4
    assert distances[0] < 1_000
    assert all(2 * near < far for near, far in itertools.pairwise(distances))


def test_what_a_head_has_not_moved_on_from_is_not_kept() -> None:
    assert plan_retention([at(1, 500)], at(2, 1_000), position=1_000, max_retained=4) == (1,)


def test_none_are_kept_when_none_are_wanted() -> None:
    assert plan_retention([at(1, 500)], at(2, 1_000), position=2_000, max_retained=0) == ()
