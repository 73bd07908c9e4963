from __future__ import annotations

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.history.reach import attention_reach
from tests.nsm_lab.evaluation.models import random_model, small_config


@pytest.mark.parametrize(
    ("pattern", "reach"), [("N", 0), ("NNNW", 20), ("NW", 40), ("A", 400), ("[NW]", 40 * 2), ("(WNW)", 40 * 4)]
)
def test_attention_reach_is_the_sum_over_the_layers(pattern: str, reach: int) -> None:
    config = ModelConfig(layer_pattern=pattern, num_layers=4, window=20, max_context=100)
    assert attention_reach(config) == reach


def test_attention_reach_is_how_far_a_model_of_windows_sees(tiny_tokenizer: Tokenizer) -> None:
    config = small_config(tiny_tokenizer, layer_pattern="W", window=5, num_layers=2)
    model, ids = random_model(config).eval(), torch.arange(30)[None] + 1
    with torch.no_grad():
        before, _ = model(ids, model.initial_state(1))
        changed = [_changed(model, ids, position, before) for position in range(30)]
    assert 29 - changed.index(True) == attention_reach(config) == 10


def _changed(model: torch.nn.Module, ids: torch.Tensor, position: int, before: torch.Tensor) -> bool:
    other = ids.clone()
    other[0, position] = 100
    after, _ = model(other, model.initial_state(1))
    return not torch.equal(after[0, -1], before[0, -1])
