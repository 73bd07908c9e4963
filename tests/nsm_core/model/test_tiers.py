"""A model with fewer slots is the model whose other slots are masked, with smaller states."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import SoftmaxRouter, build_router
from nsm_core.model.tiers import tier_model
from nsm_core.state.spec import State

CONFIG = ModelConfig(
    vocab_size=100, d_model=32, num_layers=2, num_heads=2, num_memory_slots=16, write_top_k=6, mlp_hidden=64,
    timescale_groups=4, num_kv_heads=1, window=24, communication_interval=64, state_tiers=(4, 8),
)  # fmt: skip
SIGMOID = {"router": "sigmoid", "write_top_k": 16}
ALLOCATING = {"allocation": True, "start_slots": 6, "prune_age": 1, "prune_share": 0.8, "allocate_pressure": 0.003}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": SIGMOID,
    "hybrid": {"layer_pattern": "NW"},
    "in one layer": {"layer_pattern": "[NW](WNL)"},
    "communicating": {"layer_pattern": "C", "communication_top_k": 6},
    "allocating": {**SIGMOID, **ALLOCATING},
    "hybrid projector": {"projector": "hybrid"},
    "direct projector": {"projector": "direct"},
}


def make_model(kind: str) -> NsmModel:
    torch.manual_seed(2)
    model = NsmModel(dataclasses.replace(CONFIG, **KINDS[kind])).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


def masked(model: NsmModel, ids: Tensor, num_slots: int) -> tuple[Tensor, State]:
    return model.read(ids, model.initial_state(len(ids)), num_slots=torch.full((len(ids),), num_slots))


@pytest.mark.parametrize("num_slots", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_says_what_the_model_says_without_its_other_slots(kind: str, num_slots: int) -> None:
    model = make_model(kind)
    small = tier_model(model, num_slots)
    ids = torch.randint(100, (2, 150))
    hidden, state = small(ids, small.initial_state(2))
    want, whole = masked(model, ids, num_slots)
    torch.testing.assert_close(hidden, want, rtol=2e-4, atol=2e-4)
    for name, value in state.items():
        other = whole[name] if whole[name].dim() < 3 or "kv" in name else whole[name].narrow(2, 0, value.shape[2])
        torch.testing.assert_close(value, other, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(small.logits(hidden), model.logits(hidden))


@pytest.mark.parametrize("kind", ["softmax", "allocating"])
def test_a_tier_goes_on_token_by_token(kind: str) -> None:
    small = tier_model(make_model(kind), 4)
    ids = torch.randint(100, (1, 80))
    want, _ = small(ids, small.initial_state(1))
    state, steps = small.initial_state(1), []
    for t in range(80):
        hidden, state = small.step(ids[:, t], state)
        steps.append(hidden)
    torch.testing.assert_close(torch.stack(steps, dim=1), want, rtol=2e-4, atol=2e-4)


def test_states_shrink_with_the_slots_and_weights_are_shared() -> None:
    model = make_model("sigmoid")
    small = tier_model(model, 4)
    tails = 2 * 9 * CONFIG.d_model * 4 + 8
    assert small.state_spec.num_bytes - tails == (model.state_spec.num_bytes - tails) // 4
    ours, theirs = dict(small.named_parameters()), dict(model.named_parameters())
    for name in ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mixer.project.weight"):
        assert ours[name].data_ptr() == theirs[name].data_ptr()
    assert small.config.num_memory_slots == 4
    assert not any(weight.requires_grad for weight in ours.values())


@pytest.mark.parametrize("num_slots", [8, 24, 64])
def test_the_first_slots_of_a_model_with_tiers_span_its_time_scales(num_slots: int) -> None:
    """From the start: training moves them only so far."""
    config = ModelConfig(num_memory_slots=num_slots, write_top_k=num_slots, router="sigmoid", state_tiers=(4,))
    with_tiers, without = (
        build_router(dataclasses.replace(config, state_tiers=tiers)).logits.bias.view(8, num_slots)[0].sigmoid()
        for tiers in ((4,), ())
    )
    torch.testing.assert_close(with_tiers.sort().values, without)
    first = with_tiers[:4].sort().values
    assert first[0] == without[0]
    assert (first[1:] / first[:-1]).min() > (without[-1] / without[0]) ** 0.15
    groups = build_router(dataclasses.replace(config, router="softmax", write_top_k=4, timescale_groups=4))
    assert isinstance(groups, SoftmaxRouter)
    assert len(groups.log_timescale[0, :4].unique()) == 4
