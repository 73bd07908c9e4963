"""Layers with one thing changed: what is changed stays so, and all else is the layer that it comes from."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.quality.trial_layers import (
    SHORT_TIMESCALES,
    TRIAL_LAYERS,
    ShortTimescales,
    SingleTokenRoutes,
    UndecayedSlots,
    UnmixedDeltaNet,
    register_trial_layers,
)
from nsm_core.config import ModelConfig
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_lab.baselines.register import BASELINES

TINY = ModelConfig(vocab_size=64, d_model=32, num_layers=1, num_heads=4, num_memory_slots=8, write_top_k=8,
                   slot_width=8, mlp_hidden=32)  # fmt: skip


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))


def rows(x: torch.Tensor) -> Segments:
    return Segments(torch.arange(x.shape[1]).expand(len(x), -1))


def test_no_letter_is_that_of_a_baseline() -> None:
    assert not set(TRIAL_LAYERS) & set(BASELINES)


@pytest.mark.parametrize("letter", TRIAL_LAYERS)
def test_a_text_in_pieces_is_read_as_in_one(letter: str) -> None:
    register_trial_layers()
    torch.manual_seed(1)
    model = NsmModel(dataclasses.replace(TINY, layer_pattern=letter)).eval()
    ids = torch.randint(64, (1, 40))
    with torch.inference_mode():
        whole, _ = model.forward(ids, model.initial_state(1))
        _, state = model.forward(ids[:, :17], model.initial_state(1))
        rest, _ = model.forward(ids[:, 17:], state)
    torch.testing.assert_close(rest, whole[:, 17:], atol=1e-5, rtol=1e-5)


def test_slots_that_do_not_decay_lose_nothing_but_what_a_write_removes(x: torch.Tensor) -> None:
    mixer = UndecayedSlots(TINY)
    tokens, _, _ = mixer.tokens(x, mixer.initial_state(2)["conv_tail"], rows(x))
    assert tokens["log_decay"].eq(0.0).all()
    assert tokens["strength"].gt(0.0).all()


def test_short_time_scales_are_those_of_the_decays_at_the_start() -> None:
    mixer = ShortTimescales(TINY)
    log_decay = -torch.nn.functional.softplus(mixer.rates.bias[4:])
    low, high = SHORT_TIMESCALES
    assert (-1.0 / log_decay[0]).item() == pytest.approx(low, rel=1e-3)
    assert (-1.0 / log_decay[-1]).item() == pytest.approx(high, rel=1e-3)
    torch.testing.assert_close(mixer.rates.bias[:4], KeyedMixer(TINY).rates.bias[:4])


def test_a_route_of_one_token_is_written_where_the_token_before_read(x: torch.Tensor) -> None:
    mixer = SingleTokenRoutes(TINY)
    tokens, _, _ = mixer.tokens(x, mixer.initial_state(2)["conv_tail"], rows(x))
    torch.testing.assert_close(tokens["k"][:, 1:], tokens["q"][:, :-1])


@pytest.mark.parametrize("layer", [SingleTokenRoutes, UnmixedDeltaNet])
def test_fixed_taps_get_no_gradient(layer: type[SingleTokenRoutes | UnmixedDeltaNet], x: torch.Tensor) -> None:
    mixer = layer(TINY)
    with torch.no_grad():
        mixer.out.weight.normal_()  # zero at the start, so that nothing would get one
    out, _ = mixer.forward(x, mixer.initial_state(2), rows(x))
    out.square().sum().backward()
    with_gradient = {name for name, weight in mixer.named_parameters() if weight.grad is not None}
    assert "project.weight" in with_gradient
    assert not any("conv" in name for name in with_gradient)
