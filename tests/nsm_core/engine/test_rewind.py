"""Few copies of the state, and always one that is old enough."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.sequence import MIN_SPACING_TOKENS, RewindPoints
from nsm_core.state.spec import State


class Row:
    """Stands for the row of a sequence: its state is the number of tokens fed; counts its copies."""

    def __init__(self) -> None:
        self.num_fed = 0
        self.num_copies = 0

    def copy(self) -> State:
        self.num_copies += 1
        return {"position": torch.tensor([self.num_fed])}


def feed(points: RewindPoints, row: Row, holding_since: list[int | None]) -> None:
    for holding in holding_since:
        points.update(num_fed=row.num_fed, num_read=row.num_fed, holding_since=holding, copy=row.copy)
        row.num_fed += 1


def test_rewind_points_without_held_text_copy_no_state() -> None:
    points, row = RewindPoints(), Row()
    feed(points, row, [None] * 100)
    assert row.num_copies == 0
    with pytest.raises(StopIteration):
        points.latest(num_visible=100)


def test_the_copy_is_of_the_state_before_the_first_held_token() -> None:
    points, row = RewindPoints(), Row()
    feed(points, row, [None, None, 3, 3, 3])
    point = points.latest(num_visible=2)
    assert (point.num_fed, point.state["position"].tolist(), row.num_copies) == (2, [2], 1)


def test_a_released_hold_frees_its_copy() -> None:
    points, row = RewindPoints(), Row()
    feed(points, row, [1, None])
    with pytest.raises(StopIteration):
        points.latest(num_visible=1)


@pytest.mark.parametrize("width", [1, 2, 5, 63, 64, 65, 200])
def test_a_moving_hold_always_has_a_point_that_is_not_much_older(width: int) -> None:
    """The held text is always the last `width` tokens."""
    points, row = RewindPoints(), Row()
    for index in range(1, 1000):
        since = max(1, index - width + 1)
        feed(points, row, [since])
        point = points.latest(num_visible=since - 1)
        assert point.state["position"].tolist() == [point.num_fed]
        assert since - 1 - point.num_fed <= MIN_SPACING_TOKENS + width
    assert 1000 // (MIN_SPACING_TOKENS + width) <= row.num_copies <= 1 + 1000 // MIN_SPACING_TOKENS


@given(st.lists(st.integers(0, 3), min_size=80, max_size=160))
def test_a_hold_that_moves_in_any_way_has_a_point(steps: list[int]) -> None:
    points, row, since = RewindPoints(), Row(), 1
    for index, step in enumerate(steps, start=1):
        since = min(since + step, index)
        feed(points, row, [since])
        assert points.latest(num_visible=since - 1).num_fed < since
