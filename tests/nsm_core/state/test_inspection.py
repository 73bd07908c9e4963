from __future__ import annotations

import pytest
import torch

from nsm_core.errors import InvalidRequest, SnapshotCorrupt
from nsm_core.model.nsm import NsmModel
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.state.inspection import inspect_state
from nsm_core.state.report import Detail
from nsm_core.tokenizer import Tokenizer
from tests.nsm_lab.evaluation.models import random_model, small_config
from tests.support import rwkv7


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


def test_keyed_slots_start_empty_so_what_is_told_of_them_needs_no_start(tiny_tokenizer: Tokenizer) -> None:
    model = random_model(small_config(tiny_tokenizer, layer_pattern="K")).eval().requires_grad_(False)
    start = model.initial_state(1)
    _, state = model.forward(torch.arange(5)[None], start)
    fresh = inspect_state(model.state_spec, None, start).layers[0]
    layer = inspect_state(model.state_spec, model.state_spec.pack(state), start).layers[0]
    assert (fresh.kind, layer.kind) == ("keyed", "keyed")
    assert fresh.use is not None
    assert layer.use is not None
    assert (fresh.use.untouched_share, fresh.use.effective_slots) == (1.0, 0.0)
    assert (layer.use.mean.key_norm, layer.use.mean.moved, layer.use.mean.cosine) == (None, None, None)
    lengths = state["layers.0.slots"][0].norm(dim=-1)
    assert layer.use.mean.value_norm == pytest.approx(float(lengths.mean()), rel=1e-5)
    assert layer.use.untouched_share == 0.0


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


@pytest.mark.parametrize("gate", ["gru", "lstm"])
def test_gated_slots_are_described_without_keys(tiny_tokenizer: Tokenizer, gate: str) -> None:
    config = small_config(tiny_tokenizer, layer_pattern="G", gate=gate, gate_chunk=8)
    model = random_model(config).eval().requires_grad_(False)
    _, state = model.forward(torch.arange(20)[None], model.initial_state(1))
    report = inspect_state(model.state_spec, model.state_spec.pack(state), model.initial_state(1), detail=Detail.HEAD)
    for layer in report.layers:
        assert (layer.kind, layer.part) == ("gated", None)
        assert layer.use is not None
        assert (layer.use.num_slots, layer.use.mean.key_norm) == (8, None)
        norm = state[f"layers.{layer.layer}.gated"].norm(dim=-1).mean()
        assert layer.use.mean.value_norm == pytest.approx(float(norm), rel=1e-5)
        assert layer.use.mean.moved is not None
        assert layer.use.mean.moved > 0


def test_slots_that_are_read_without_keys_have_none(tiny_tokenizer: Tokenizer) -> None:
    model = random_model(small_config(tiny_tokenizer, projector="direct")).eval().requires_grad_(False)
    _, state = model.forward(torch.arange(5)[None], model.initial_state(1))
    use = inspect_state(model.state_spec, model.state_spec.pack(state), model.initial_state(1)).layers[0].use
    assert use is not None
    assert use.mean.key_norm is None
    assert use.mean.value_norm == pytest.approx(float(state["layers.0.slots"].norm(dim=-1).mean()), rel=1e-5)


@pytest.mark.parametrize("pattern", ["(WNL)", "[GW]"])
def test_several_in_one_layer_are_told_apart(tiny_tokenizer: Tokenizer, pattern: str) -> None:
    model = random_model(small_config(tiny_tokenizer, layer_pattern=pattern)).eval().requires_grad_(False)
    report = inspect_state(model.state_spec, None, model.initial_state(1), layer=1)
    kinds = {"W": "attention", "N": "slots", "G": "gated"}
    letters = [(part, kinds[letter]) for part, letter in enumerate(pattern[1:-1]) if letter in kinds]
    assert [(use.part, use.kind) for use in report.layers] == letters
    whole = sum(tensor.num_bytes for tensor in model.state_spec.tensors if tensor.name.startswith("layers.1."))
    assert 0 < sum(use.num_bytes for use in report.layers) <= whole


def test_a_heads_matrix_is_described_by_its_rows() -> None:
    config = rwkv7.small_config()
    model = Rwkv7Model(config, rwkv7.random_tensors(config))
    start = model.initial_state(1)
    rested = inspect_state(model.state_spec, None, start).layers
    assert [(layer.kind, layer.layer) for layer in rested] == [("matrix", 0), ("matrix", 1)]
    with torch.no_grad():
        _, state = model.forward(torch.arange(9)[None], start)
    state["layers.1.matrix"][0, 2, 5:] = 0.0
    report = inspect_state(model.state_spec, model.state_spec.pack(state), start, detail=Detail.HEAD)
    assert report.position == 9
    layer = report.layers[1]
    assert layer.heads is not None
    assert [head.num_slots for head in layer.heads] == [config.head_size] * config.num_heads
    rows = state["layers.1.matrix"][0].double().norm(dim=-1)
    for head, norms in zip(layer.heads, rows, strict=True):
        assert head.mean.value_norm == pytest.approx(float(norms.mean()))
        assert (head.mean.moved, head.mean.key_norm) == (None, None)
    assert layer.heads[2].untouched_share == (config.head_size - 5) / config.head_size
    assert layer.heads[2].effective_slots is not None
    assert 1 <= layer.heads[2].effective_slots <= 5
