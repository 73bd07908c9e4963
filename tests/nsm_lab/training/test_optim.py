"""Which parameters Muon trains."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_lab.training.optim import muon_matrices
from nsm_lab.training.presets import PRESETS

MATRICES = ("mixer.project.weight", "mixer.out.weight", "mlp.up.weight", "mlp.down.weight")
TINY = dataclasses.replace(PRESETS["tiny"], num_kv_heads=4)
ONE_MIXER_A_LAYER = sorted(name for name, config in PRESETS.items() if not set("[(") & set(config.layer_pattern))


def make_model(config: ModelConfig) -> NsmModel:
    with torch.device("meta"):
        return NsmModel(config)


@pytest.mark.parametrize("preset", ONE_MIXER_A_LAYER)
def test_presets_of_one_mixer_a_layer_train_the_matrices_that_they_always_did(preset: str) -> None:
    """In the same order, too: a run's file for --resume knows the optimiser's memory by it."""
    model = make_model(PRESETS[preset])
    assert muon_matrices(model) == [name for name, _ in model.named_parameters() if name.endswith(MATRICES)]


@pytest.mark.parametrize("pattern", ["[NW]", "(WNL)", "[CW]", "(NM)"])
def test_mixers_that_share_a_layer_train_as_they_do_alone(pattern: str) -> None:
    """Every mixer's matrices are found, whatever it is called in its layer, and nothing else of it is."""
    alone = make_model(dataclasses.replace(TINY, layer_pattern=pattern.strip("()[]")))
    together = make_model(dataclasses.replace(TINY, layer_pattern=pattern, num_layers=1))
    parts = len(pattern) - 2
    shapes = [alone.get_parameter(name).shape for name in muon_matrices(alone)[: 4 * parts] if ".mixer." in name]
    found = [name for name in muon_matrices(together) if ".mixer." in name]
    assert [together.get_parameter(name).shape for name in found] == shapes
    assert all(".mixer.mixers." in name for name in found)


@pytest.mark.parametrize("pattern", sorted("NCGLMWAfplrmds"))
def test_scores_and_states_are_no_matrices(pattern: str) -> None:
    config = dataclasses.replace(TINY, layer_pattern=pattern, projector="hybrid")
    model = make_model(config)
    found = muon_matrices(model)
    assert all(model.get_parameter(name).dim() == 2 for name in found)
    assert any(".mixer." in name for name in found)
    for part in ("embedding", "router", "conv", "initial", "bias", "count", "norm"):
        assert not [name for name in found if part in name]
