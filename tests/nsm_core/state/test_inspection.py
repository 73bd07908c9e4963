from __future__ import annotations

import pytest
import torch

from nsm_core.errors import InvalidRequest, SnapshotCorrupt
from nsm_core.model.nsm import NsmModel
from nsm_core.state.inspection import inspect_state
from nsm_core.state.report import Detail
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.evaluation.models import random_model, small_config


@pytest.fixture(scope="module")
def hybrid(tiny_tokenizer: Tokenizer) -> NsmModel:
    return random_model(small_config(tiny_tokenizer, layer_pattern="WN")).eval().requires_grad_(False)


def test_the_learned_start_is_untouched(hybrid: NsmModel) -> None:
    report = inspect_state(hybrid.state_spec, None, hybrid.initial_state(1))
    window, slots = report.layers
    assert (report.position, report.num_bytes) == (0, hybrid.state_spec.num_bytes)
    assert (window.kind, window.window, window.filled, window.use) == ("attention", 16, 0, None)
    assert slots.use is not None
    assert slots.heads is None
    assert (slots.use.num_slots, slots.use.untouched_share, slots.use.effective_slots) == (8, 1.0, 0.0)
    assert slots.use.mean.moved == 0.0
    assert slots.use.mean.cosine == pytest.approx(1.0)


@pytest.mark.parametrize(("num_tokens", "filled"), [(5, 5), (16, 16), (40, 16)])
def test_a_window_fills_with_the_tokens_read(hybrid: NsmModel, num_tokens: int, filled: int) -> None:
    _, state = hybrid.forward(torch.arange(num_tokens)[None], hybrid.initial_state(1))
    report = inspect_state(hybrid.state_spec, hybrid.state_spec.pack(state), hybrid.initial_state(1))
    assert (report.position, report.layers[0].filled) == (num_tokens, filled)
    use = report.layers[1].use
    assert use is not None
    assert use.effective_slots is not None
    assert use.mean.moved is not None
    assert use.mean.moved > 0
    assert 1 <= use.effective_slots <= use.num_slots


def test_figures_of_slots_moved_by_hand(hybrid: NsmModel) -> None:
    start = hybrid.initial_state(1)
    state = {name: value.clone() for name, value in start.items()}
    state["layers.1.slots"][0, 0, 3] *= -1.0  # the far side of its start
    state["layers.1.slots"][0, 1, :2] *= 2.0
    raw = hybrid.state_spec.pack(state)
    (layer,) = inspect_state(hybrid.state_spec, raw, start, detail=Detail.SLOT, layer=1).layers
    assert layer.heads is not None
    assert layer.use is not None
    first, second = layer.heads
    assert first.slots is not None
    assert second.slots is not None
    assert (first.slots[3].moved, first.slots[3].cosine) == (pytest.approx(2.0), pytest.approx(-1.0))
    assert (second.slots[0].moved, second.slots[0].cosine) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (first.untouched_share, second.untouched_share, layer.use.untouched_share) == (7 / 8, 6 / 8, 13 / 16)
    assert first.effective_slots == pytest.approx(1.0)
    assert second.effective_slots is not None
    assert 1.0 < second.effective_slots <= 2.0


def test_numbers_that_are_not_finite_are_none(hybrid: NsmModel) -> None:
    state = hybrid.initial_state(1)
    state["layers.1.slots"][0, 0, 0, 0] = torch.nan
    use = inspect_state(hybrid.state_spec, hybrid.state_spec.pack(state), hybrid.initial_state(1)).layers[1].use
    assert use is not None
    assert (use.mean.moved, use.effective_slots) == (None, None)


@pytest.mark.parametrize(("detail", "layer"), [(Detail.LAYER, 2), (Detail.HEAD, -1), (Detail.SLOT, None)])
def test_a_wrong_layer_is_refused(hybrid: NsmModel, detail: Detail, layer: int | None) -> None:
    with pytest.raises(InvalidRequest, match="layer") as caught:
        inspect_state(hybrid.state_spec, None, hybrid.initial_state(1), detail=detail, layer=layer)
    assert caught.value.param == "layer"


def test_bytes_of_another_length_are_refused(hybrid: NsmModel) -> None:
    with pytest.raises(SnapshotCorrupt):
        inspect_state(hybrid.state_spec, b"short", hybrid.initial_state(1))
