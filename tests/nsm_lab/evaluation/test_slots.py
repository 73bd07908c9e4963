from __future__ import annotations

import math

import pytest
import torch

from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.slots import measure_slot_usage
from tests.nsm_lab.evaluation.models import small_config


def ids(length: int) -> torch.Tensor:
    return torch.randint(1, 400, (length,))


def test_a_slot_that_takes_everything_shows(model: NsmModel) -> None:
    """With a selection bias on two slots (k = 2) only these are written to, in every head."""
    for block in model.layers:
        block.mixer.router.selection_bias[:, :2] += 100.0
    model.eval()
    usage = measure_slot_usage(model, [ids(300)])
    assert usage is not None
    assert (usage.num_tokens, usage.slots_per_head) == (300, 8)
    assert usage.dead_fraction == pytest.approx(6 / 8)
    assert usage.effective_slots == pytest.approx(2.0, abs=0.01)
    assert usage.max_over_mean_load == pytest.approx(4.0, abs=0.05)
    assert [layer.layer for layer in usage.layers] == [0, 1]
    for layer in usage.layers:
        assert layer.effective_by_weight == pytest.approx(2.0, abs=0.1)
        assert layer.half_life_p10 is not None
        assert layer.half_life_p90 is None  # of a slot that nothing is written to


def test_half_lives_and_written_sums_follow_from_the_write_strength(model: NsmModel) -> None:
    """One slot takes every token at a fixed strength: what it holds decays by exp(-strength) a token."""
    for block in model.layers:
        router = block.mixer.router
        router.selection_bias[:, 0] += 100.0
        with torch.no_grad():
            router.logits.weight.zero_()
            router.logits.bias[:8] = router.logits.bias[8:] = torch.tensor([50.0, *[0.0] * 7])
            router.strength.weight.zero_()
            router.strength.bias.fill_(math.log(math.expm1(0.5)))
            router.log_timescale.zero_()
    usage = measure_slot_usage(model.eval(), [ids(64)])
    assert usage is not None
    for layer in usage.layers:
        assert layer.written_per_token == pytest.approx(-math.expm1(-0.5), rel=1e-5)


def test_layers_of_other_kinds_have_no_slots(tiny_tokenizer: Tokenizer) -> None:
    hybrid = NsmModel(small_config(tiny_tokenizer, layer_pattern="WN", num_layers=4))
    usage = measure_slot_usage(hybrid.eval(), [ids(40)])
    assert usage is not None
    assert [layer.layer for layer in usage.layers] == [1, 3]
    assert measure_slot_usage(NsmModel(small_config(tiny_tokenizer, layer_pattern="W")).eval(), [ids(40)]) is None


def test_numbers_of_several_texts_are_those_of_all_their_tokens(model: NsmModel) -> None:
    model.eval()
    usage = measure_slot_usage(model, [ids(100), ids(1), ids(2500)])
    assert usage is not None
    assert usage.num_tokens == 2601
    assert 0.0 <= usage.dead_fraction <= 1.0
    assert 1.0 <= usage.effective_slots <= 8.0


def test_the_model_is_watched_only_while_it_is_measured(model: NsmModel) -> None:
    model.eval()
    measure_slot_usage(model, [ids(5)])
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(IndexError):
        measure_slot_usage(model, [torch.tensor([10**6])])
    assert not any(module._forward_hooks for module in model.modules())
