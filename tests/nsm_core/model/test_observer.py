from __future__ import annotations

import math

import pytest
import torch

from nsm_core.inspection.layer_hooks import hookable_layers, hooked
from nsm_core.inspection.routing_capture import capture
from nsm_core.model.nsm import NsmModel
from nsm_core.model.observer import MAX_SHARE, OBSERVE_EVERY_S, ModelObserver, _figures
from nsm_core.state.spec import POSITION, State
from tests.support.fake_meters import FakeClock
from tests.support.models import random_model, small_config


def read(model: NsmModel, num_tokens: int, batch_size: int = 2) -> State:
    with torch.inference_mode():
        state = model.initial_state(batch_size)
        if num_tokens:
            ids = torch.randint(64, (batch_size, num_tokens), generator=torch.Generator().manual_seed(0))
            _, state = model(ids, state)
    return state


def sample(observer: ModelObserver, state: State, *, fresh: bool = True, names: tuple[str, ...] = ("a", "b")) -> None:
    observer.observe(names, is_fresh=[fresh] * len(names), ids=[5, 6][: len(names)], state=state)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_figures_are_those_of_the_routers_own_weights(router: str) -> None:
    model = random_model(small_config(64, router=router, write_top_k=2 if router == "softmax" else 8))
    observer = ModelObserver(model, clock=FakeClock())
    state = read(model, 10)
    weights: list[torch.Tensor] = []
    handles = [
        block.mixer.router.register_forward_hook(lambda _router, _given, g: weights.append(1 - g.exp()))
        for block in model.layers
    ]
    with torch.inference_mode():
        model.step(torch.tensor([5, 6]), state)
    for handle in handles:
        handle.remove()
    sample(observer, state)
    for layer, wanted in zip(observer.layers, weights, strict=True):
        shares = wanted / wanted.sum(-1, keepdim=True)
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1)
        assert layer.openness == pytest.approx(float(wanted.mean()), rel=1e-4)
        assert layer.entropy == pytest.approx(float(entropy.mean()) / math.log(8), rel=1e-4)
        assert layer.states_per_token == pytest.approx(float(entropy.exp().mean()), rel=1e-4)
        assert layer.sparsity == pytest.approx(float((wanted < 1e-3).float().mean()))
        assert 0 < layer.utilisation <= 1
        assert 1 <= layer.states_per_token <= 8


def test_figures_of_keyed_slots_are_those_that_a_captured_token_has() -> None:
    model = random_model(small_config(64, layer_pattern="KW"))
    observer, state = ModelObserver(model, clock=FakeClock()), read(model, 10)
    layers = hookable_layers(model)
    with torch.inference_mode(), hooked(layers):
        model.step(torch.tensor([5, 6]), state)
    wanted = capture(layers[0], layers[0].state_of(state), state[POSITION])
    assert wanted is not None
    assert wanted.write is not None
    sample(observer, state)
    assert [layer.layer for layer in observer.layers] == ["0"]
    assert observer.layers[0].openness == pytest.approx(float(wanted.write.mean()), rel=1e-4)
    assert observer.layers[0].utilisation == 1.0


def test_a_sparse_router_shows_so() -> None:
    model = random_model(small_config(64, router="softmax", write_top_k=2))
    observer = ModelObserver(model, clock=FakeClock())
    sample(observer, read(model, 10))
    assert all(layer.sparsity >= 0.5 for layer in observer.layers)
    assert all(layer.states_per_token <= 4 for layer in observer.layers)


def test_a_token_that_writes_nothing_writes_to_no_state() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])  # two tokens of one head
    nothing = torch.zeros(2, 1, 4, dtype=torch.bool)
    layer = ModelObserver(random_model(small_config(64)))._layers[0]
    figures = _figures(layer, weights, nothing, None)
    assert figures.states_per_token == pytest.approx((2 + 0) / 2)


def test_observation_leaves_model_and_state_unchanged() -> None:
    model = random_model(small_config(64))
    observer, state = ModelObserver(model, clock=FakeClock()), read(model, 10)
    before = {name: tensor.clone() for name, tensor in state.items()}
    sample(observer, state)
    assert all(torch.equal(before[name], state[name]) for name in state)
    assert not any(block.mixer.router._forward_hooks for block in model.layers)


def test_slots_that_leave_their_start_or_go_back_to_it_are_counted() -> None:
    model = random_model(small_config(64, router="sigmoid", write_top_k=8))
    observer = ModelObserver(model, clock=FakeClock())
    start, used = read(model, 0), read(model, 10)
    sample(observer, start)
    assert [(layer.num_allocated, layer.num_pruned, layer.utilisation) for layer in observer.layers] == [(0, 0, 0)] * 2
    sample(observer, used)
    assert [layer.num_allocated for layer in observer.layers] == [2 * 2 * 8] * 2  # rows, heads, slots
    sample(observer, used)
    sample(observer, start)
    assert [(layer.num_allocated, layer.num_pruned) for layer in observer.layers] == [(32, 32)] * 2


def test_a_resumed_state_that_was_not_seen_before_is_no_change() -> None:
    model = random_model(small_config(64, router="sigmoid", write_top_k=8))
    observer = ModelObserver(model, clock=FakeClock())
    sample(observer, read(model, 10), fresh=False)
    assert [layer.num_allocated for layer in observer.layers] == [0, 0]


def test_M7_observations_are_rare_and_rarer_if_expensive() -> None:
    times = iter([0.0, 10.0, 10.0, 10.001, 10.0 + OBSERVE_EVERY_S, 20.0, 22.0, 22.0 + 1.9 / MAX_SHARE, 1e9])
    model = random_model(small_config(64))
    observer = ModelObserver(model, clock=lambda: next(times))
    assert observer.is_due  # at 10
    sample(observer, read(model, 1))  # takes a millisecond
    assert not observer.is_due
    sample(observer, read(model, 1))  # takes two seconds
    assert not observer.is_due
    assert observer.is_due


@pytest.mark.parametrize("pattern", ["(NW)", "[NW]"])
def test_a_mixer_beside_others_is_found_by_its_number(pattern: str) -> None:
    model = random_model(small_config(64, layer_pattern=pattern))
    observer = ModelObserver(model, clock=FakeClock())
    sample(observer, read(model, 10))
    assert [layer.layer for layer in observer.layers] == ["0.0", "1.0"]


def test_model_without_routers_is_not_observed() -> None:
    observer = ModelObserver(random_model(small_config(64, layer_pattern="A")), clock=FakeClock())
    assert not observer.is_due


def test_slots_that_come_and_go_are_counted_by_their_mask() -> None:
    allocating = {"router": "sigmoid", "write_top_k": 8, "allocation": True, "start_slots": 6}
    model = random_model(small_config(64, **allocating))
    observer, state = ModelObserver(model, clock=FakeClock()), read(model, 10)
    sample(observer, state)
    assert [(layer.num_active, layer.num_allocated, layer.num_pruned) for layer in observer.layers] == [(6, 0, 0)] * 2
    changed = {name: tensor.clone() for name, tensor in state.items()}
    for layer in range(2):
        changed[f"layers.{layer}.active"][:, 0] = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])  # one head of two
    sample(observer, changed)
    assert [(layer.num_active, layer.num_allocated, layer.num_pruned) for layer in observer.layers] == [(6.5, 4, 2)] * 2


def test_a_layer_that_does_not_allocate_has_all_its_slots_in_use() -> None:
    model = random_model(small_config(64))
    observer = ModelObserver(model, clock=FakeClock())
    sample(observer, read(model, 0))
    assert [layer.num_active for layer in observer.layers] == [8, 8]
