from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.figures import routing_of, smoothness, state_figures, token_figures
from nsm_core.inspection.reading import LayerActivity, StateTrajectory, inspect
from tests.support.models import random_model, small_config


def layer_of(write: list[list[float]], read: list[list[float]] | None = None) -> LayerActivity:
    """One head; write and read by token and state."""
    return LayerActivity(
        name="0",
        kind="slots",
        write=torch.tensor(write)[:, None],
        read=None if read is None else torch.tensor(read)[:, None],
        seen=None,
        trajectory=None,
        exchanges={},
        chunk=None,
        carried=None,
    )


def lives_with(turn: Tensor) -> StateTrajectory:
    nothing = torch.zeros(0)
    return StateTrajectory(begin=nothing, end=nothing, moved=nothing, change=nothing, turn=turn, at_start=nothing)


def test_routing_is_the_shares_of_what_a_token_writes() -> None:
    layer = layer_of([[0.1, 0.3], [0.0, 0.0]])
    torch.testing.assert_close(routing_of(layer)[:, 0], torch.tensor([[0.25, 0.75], [0.0, 0.0]]))


def test_a_token_that_writes_to_all_alike_has_the_highest_entropy() -> None:
    figures = token_figures(layer_of([[0.2, 0.2, 0.2, 0.2], [0.8, 0.0, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0]]))
    assert figures.entropy[:, 0].tolist() == pytest.approx([1, 0, 0.5])
    assert figures.states_per_token[:, 0].tolist() == pytest.approx([4, 1, 2])
    assert figures.sparsity[:, 0].tolist() == pytest.approx([0, 0.75, 0.5])
    assert figures.strength[:, 0].tolist() == pytest.approx([0.8, 0.8, 0.6])


def test_states_by_what_they_get_and_give() -> None:
    write = [[0.5, 0.2, 0.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    read = [[1.0, 0.0, 0.0]] * 4
    figures = state_figures(layer_of(write, read))
    assert figures.importance[0].tolist() == pytest.approx([1.5, 0.05, 0.0])
    assert figures.utilisation[0].tolist() == pytest.approx([1, 0.25, 0])
    assert figures.half_life[0].tolist() == pytest.approx([1, 4 * math.log(2) / -math.log(0.8), math.inf])
    assert figures.specialisation[0].tolist() == pytest.approx([0, 1, 0], abs=1e-6)


def test_a_state_that_goes_straight_on_is_smooth() -> None:
    turn = torch.tensor([[math.nan, math.nan, math.nan], [1.0, -1.0, math.nan], [1.0, 1.0, math.nan]])[:, None]
    found = smoothness(dataclasses.replace(layer_of([[0.0]]), trajectory=lives_with(turn)))
    assert found[0, :2].tolist() == [1, 0]
    assert math.isnan(found[0, 2])


def test_a_layer_that_has_no_states_says_so() -> None:
    (layer,) = inspect(random_model(small_config(64, num_layers=1, layer_pattern="W")), [1, 2]).layers
    for figure in (routing_of, token_figures, state_figures, smoothness):
        with pytest.raises(InvalidRequest, match=r"layer 0 \(attention\)"):
            figure(layer)
