from __future__ import annotations

import pytest
import torch

from nsm_core.evaluation.slots import measure_slot_usage
from nsm_core.model.nsm import NsmModel


def ids(length: int) -> torch.Tensor:
    return torch.randint(1, 400, (length,))


def test_a_slot_that_takes_everything_shows(model: NsmModel) -> None:
    """With a selection bias on two slots (k = 2) only these are written to, in every head."""
    for block in model.layers:
        block.mixer.router.selection_bias[:, :2] += 100.0
    model.eval()
    usage = measure_slot_usage(model, [ids(300)])
    assert (usage.num_tokens, usage.slots_per_head) == (300, 8)
    assert usage.dead_fraction == pytest.approx(6 / 8)
    assert usage.effective_slots == pytest.approx(2.0, abs=0.01)
    assert usage.max_over_mean_load == pytest.approx(4.0, abs=0.05)


def test_numbers_of_several_texts_are_those_of_all_their_tokens(model: NsmModel) -> None:
    model.eval()
    usage = measure_slot_usage(model, [ids(100), ids(1), ids(2500)])
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
