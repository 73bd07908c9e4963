"""Heads that are made to keep: which ones give way, and what training may not change."""

from __future__ import annotations

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_lab.training.keeping import (
    CONTEXT_LENGTH,
    FIRST_READ,
    TIMESCALE,
    KeepingHeads,
    make_keeping_heads,
    mean_strengths,
)

HEADS = 4
STRENGTHS = (0.01, 0.04)


@pytest.fixture
def model() -> NsmModel:
    torch.manual_seed(0)
    return NsmModel(
        ModelConfig(
            vocab_size=64,
            d_model=32,
            num_layers=2,
            num_heads=HEADS,
            layer_pattern="K",
            num_memory_slots=8,
            write_top_k=8,
            slot_width=8,
            mlp_hidden=32,
        )
    )


def mixers(model: NsmModel) -> list[KeyedMixer]:
    return [module for module in model.modules() if isinstance(module, KeyedMixer)]


def rates(mixer: KeyedMixer) -> dict[str, torch.Tensor]:
    """Strength and log decay [T,H] of random tokens."""
    return {name: rate[0] for name, rate in mixer._rates(torch.randn(1, 50, 32), None).items()}


def test_make_keeping_heads_of_new_weights_takes_the_last_heads(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS)
    for mixer in mixers(model):
        decay = rates(mixer)["log_decay"]
        assert torch.allclose(decay[:, 2:], torch.tensor(-1.0 / TIMESCALE), rtol=1e-2)
        assert (decay[:, :2] < -10.0 / TIMESCALE).all()


def test_make_keeping_heads_spares_a_head_that_has_not_learned_to_clear_itself(model: NsmModel) -> None:
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.rates.weight[:3] *= 100.0
    make_keeping_heads(model, STRENGTHS)
    for mixer in mixers(model):
        is_keeping = rates(mixer)["log_decay"][0] > -3.0 / TIMESCALE
        assert is_keeping.tolist() == [False, True, True, False]


def test_a_new_keeping_head_lets_in_little_of_what_it_reads(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS[:1])
    for mixer in mixers(model):
        let_in = mixer.out_norm.unflatten(0, (HEADS, -1))
        assert torch.allclose(let_in[-1], torch.tensor(FIRST_READ))
        assert (let_in[:-1] == 1.0).all()


def test_heads_that_keep_already_stay_and_the_strongest_keeps_the_greatest_strength(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS)
    before = [mixer.rates.bias.detach().clone() for mixer in mixers(model)]
    make_keeping_heads(model, (*STRENGTHS, 0.001))
    keeping = KeepingHeads(model, (0.02, 0.005, 0.001))
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.rates.bias += 3.0
    keeping.hold()
    for mixer, old in zip(mixers(model), before, strict=True):
        assert torch.allclose(mixer.rates.bias[HEADS + 2 :], old[HEADS + 2 :])
        strengths = torch.sigmoid(mixer.rates.bias[:HEADS])
        order = old[2:HEADS].argsort(descending=True) + 2
        assert torch.allclose(strengths[order], torch.tensor([0.02, 0.005]), rtol=1e-4)
        assert torch.allclose(strengths[1], torch.tensor(0.001), rtol=1e-4)


def test_keeping_heads_hold_their_rates_through_steps_of_an_optimiser(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS)
    keeping = KeepingHeads(model)
    before = [mixer.rates.bias.detach().clone() for mixer in mixers(model)]
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.rates.weight.normal_()
            mixer.rates.bias += 3.0
    keeping.hold()
    for mixer, old in zip(mixers(model), before, strict=True):
        assert torch.allclose(mixer.rates.bias[2:HEADS], old[2:HEADS])
        assert torch.allclose(mixer.rates.bias[HEADS + 2 :], old[HEADS + 2 :])
        assert (mixer.rates.weight[HEADS + 2 :] == 0).all()
        assert (mixer.rates.weight[2:HEADS].norm(dim=1) <= CONTEXT_LENGTH * 1.001).all()
        assert torch.allclose(mixer.rates.bias[:2], old[:2] + 3.0)


def test_keeping_heads_of_a_model_without_them_change_nothing(model: NsmModel) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    KeepingHeads(model).hold()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_strength_may_depend_on_the_token_no_more_than_is_said(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS)
    for context in (0.05, 0.0):
        with torch.no_grad():
            for mixer in mixers(model):
                mixer.rates.weight[HEADS - 2 : HEADS] = 1.0
        KeepingHeads(model, STRENGTHS, context).hold()
        for mixer in mixers(model):
            lengths = mixer.rates.weight[HEADS - 2 : HEADS].norm(dim=1)
            assert torch.allclose(lengths, torch.full((2,), context))


def test_a_head_that_writes_more_than_its_bound_on_average_is_made_to_write_less(model: NsmModel) -> None:
    make_keeping_heads(model, STRENGTHS)
    keeping = KeepingHeads(model, STRENGTHS, context=10.0)
    ids = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mixer in mixers(model):
            mixer.rates.weight[2:HEADS].normal_(std=1.0)
    bounds = torch.tensor(sorted(STRENGTHS, reverse=True))
    before = [mean[2:HEADS].sort(descending=True).values for mean in mean_strengths(model, ids)]
    assert all((mean > 2 * bounds).all() for mean in before)
    for _ in range(20):
        keeping.keep_to_budget(mean_strengths(model, ids))
        keeping.hold()
    after = [mean[2:HEADS] for mean in mean_strengths(model, ids)]
    for mixer, mean in zip(mixers(model), after, strict=True):
        order = mixer.rates.bias[2:HEADS].argsort(descending=True)
        assert (mean <= 1.05 * bounds.max()).all()
        assert (mean > 0.1 * bounds.min()).all()
        assert len(order) == 2


def test_mean_strengths_are_those_of_the_rates_and_leave_no_hook(model: NsmModel) -> None:
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    first = mixers(model)[0]
    hook = first.register_forward_hook(lambda mixer, inputs, out: seen.append(inputs[0]))
    means = mean_strengths(model, ids)
    hook.remove()
    assert [mean.shape for mean in means] == [(HEADS,), (HEADS,)]
    assert torch.allclose(means[0], first._rates(seen[0], None)["strength"].mean(dim=(0, 1)), atol=1e-6)
    assert not any(mixer.rates._forward_hooks for mixer in mixers(model))
