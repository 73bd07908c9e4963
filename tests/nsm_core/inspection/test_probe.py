"""The capture of a token's routing beside an engine's steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsm_core.inspection.probe import RoutingProbe
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from tests.support.models import random_model, small_config


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_capture_on_a_cpu_takes_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each of its many small operations would wait for the second thread: ten times as long."""
    model = random_model(small_config(64))
    seen: list[int] = []
    peek, forward = NsmModel.peek, NsmModel.forward

    def peeking(self: NsmModel, ids: Tensor, state: State) -> Tensor:
        seen.append(torch.get_num_threads())
        return peek(self, ids, state)

    def reading(self: NsmModel, ids: Tensor, state: State) -> tuple[Tensor, State]:
        seen.append(torch.get_num_threads())
        return forward(self, ids, state)

    monkeypatch.setattr(NsmModel, "peek", peeking)
    monkeypatch.setattr(NsmModel, "forward", reading)
    routing = RoutingProbe(model).capture(model.initial_state(1), [[3, 4, 5]])
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
    assert routing[0]
