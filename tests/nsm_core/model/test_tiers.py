"""A tier is the model whose other slots are masked, with smaller states, in a directory of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.identity import fingerprint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import SoftmaxRouter, build_router
from nsm_core.model.storage import WeightFormat, read_model, save_model
from nsm_core.model.tiers import tier_config, write_tier
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=512, d_model=32, num_layers=2, num_heads=2, num_memory_slots=16, write_top_k=6, mlp_hidden=64,
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


def write_and_read(
    model: NsmModel, num_slots: int, tokenizer: Tokenizer, path: Path, form: WeightFormat = WeightFormat.FP32
) -> NsmModel:
    """The model's tier, by way of its files."""
    save_model(model, tokenizer, path / "whole", form)
    write_tier(path / "whole", num_slots, path / "tier")
    return read_model(path / "tier")[0]


def masked(model: NsmModel, ids: Tensor, num_slots: int) -> tuple[Tensor, State]:
    return model.read(ids, model.initial_state(len(ids)), num_slots=torch.full((len(ids),), num_slots))


@pytest.mark.parametrize("num_slots", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_computes_the_model_without_its_other_slots(
    kind: str, num_slots: int, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_model(kind)
    small = write_and_read(model, num_slots, tiny_tokenizer, tmp_path)
    ids = torch.randint(100, (2, 150))
    hidden, state = small(ids, small.initial_state(2))
    want, whole = masked(model, ids, num_slots)
    torch.testing.assert_close(hidden, want, rtol=2e-4, atol=2e-4)
    for name, value in state.items():
        other = whole[name] if whole[name].dim() < 3 or "kv" in name else whole[name].narrow(2, 0, value.shape[2])
        torch.testing.assert_close(value, other, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(small.logits(hidden), model.logits(hidden))


@pytest.mark.parametrize("kind", ["softmax", "allocating"])
def test_a_tier_steps_as_it_reads(kind: str, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    small = write_and_read(make_model(kind), 4, tiny_tokenizer, tmp_path)
    ids = torch.randint(100, (1, 80))
    want, _ = small(ids, small.initial_state(1))
    state, steps = small.initial_state(1), []
    for t in range(80):
        hidden, state = small.step(ids[:, t], state)
        steps.append(hidden)
    torch.testing.assert_close(torch.stack(steps, dim=1), want, rtol=2e-4, atol=2e-4)


def test_states_shrink_with_the_slots(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model("sigmoid")
    small = write_and_read(model, 4, tiny_tokenizer, tmp_path)
    tails = 2 * 9 * CONFIG.d_model * 4 + 8
    assert small.state_spec.num_bytes - tails == (model.state_spec.num_bytes - tails) // 4
    assert (small.config.num_memory_slots, small.config.state_tiers) == (4, ())
    assert fingerprint(tmp_path / "whole") != fingerprint(tmp_path / "tier")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", WeightFormat)
def test_a_tier_has_the_bits_of_the_stored_weights(
    form: WeightFormat, kind: str, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Rounded numbers are not rounded again: an int8 row keeps its scale when some of its columns go."""
    small = write_and_read(make_model(kind), 4, tiny_tokenizer, tmp_path, form)
    whole, _, _ = read_model(tmp_path / "whole")
    theirs = whole.state_dict()
    for name, value in small.state_dict().items():
        other = theirs[name]
        for dim, (have, want) in enumerate(zip(other.shape, value.shape, strict=True)):
            if have != want:
                by_slot = torch.unflatten(other, dim, (-1, CONFIG.num_memory_slots))
                other = by_slot.narrow(dim + 1, 0, 4).flatten(dim, dim + 1)
        assert torch.equal(value, other), name


@pytest.mark.parametrize(
    ("num_slots", "changes", "message"),
    [
        (16, {}, "the model has no tier of 16 states: state_tiers must be rising numbers below num_memory_slots"),
        (0, {}, "the model has no tier of 0 states"),
        (
            4,
            {"layer_pattern": "WL", "state_tiers": ()},
            "state_tiers are of N and C layers",
        ),
        (4, {**SIGMOID, **ALLOCATING, "min_slots": 5, "state_tiers": ()}, "must be at least min_slots"),
    ],
)
def test_a_tier_that_the_model_cannot_have_is_refused(num_slots: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tier_config(dataclasses.replace(CONFIG, **changes), num_slots)


def test_a_directory_with_files_is_not_overwritten(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(make_model("softmax"), tiny_tokenizer, tmp_path, WeightFormat.FP32)
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        write_tier(tmp_path, 4, tmp_path)


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
