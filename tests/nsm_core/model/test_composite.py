"""Several mixers in one layer."""

from __future__ import annotations

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.state.spec import State


@pytest.mark.parametrize("pattern", ["[NW]", "[CG]", "(WNL)", "(NM)"])
def test_every_part_starts_at_zero_and_learns(pattern: str) -> None:
    """A weight of zero times a mixer whose output is zero would stay so for ever."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, d_model=16, num_layers=1, num_heads=2, num_memory_slots=8, write_top_k=2, mlp_hidden=32,
        num_kv_heads=1, window=8, layer_pattern=pattern,
    )  # fmt: skip
    model = NsmModel(config)
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=1.0), torch.randint(50, (2, 40))
    mixed, _ = model.layers[0].mixer(torch.randn(1, 9, 16), _layer_state(model), Segments(torch.arange(9)[None]))
    assert not mixed.any()
    for _ in range(3):  # outputs first, then what comes before them
        optimizer.zero_grad()
        hidden, _ = model(ids, model.initial_state(2))
        torch.nn.functional.cross_entropy(model.logits(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    for name, parameter in model.layers[0].mixer.named_parameters():
        if name.endswith(("project.weight", "out.weight", "logits.weight")):
            assert parameter.grad.any(), name


def _layer_state(model: NsmModel) -> State:
    prefix = "layers.0."
    return {
        name.removeprefix(prefix): value for name, value in model.initial_state(1).items() if name.startswith(prefix)
    }
