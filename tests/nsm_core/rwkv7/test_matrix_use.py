"""Norms and decays of heads, beside the model's own state and weights that decay by a known share."""

from __future__ import annotations

import math

import pytest
import torch

from nsm_core.rwkv7.matrix_use import PIECE_LEN, matrix_uses
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.time_mix import MAX_DECAY
from tests.support.rwkv7 import random_tensors, small_config

CONFIG = small_config(num_layers=3)
IDS = torch.randint(300, (2 * PIECE_LEN + 5,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def model() -> Rwkv7Model:
    return Rwkv7Model(CONFIG, random_tensors(CONFIG))


def test_norms_are_those_of_the_state_after_the_text(model: Rwkv7Model) -> None:
    _, state = model.forward(torch.tensor([IDS]), model.initial_state(1))
    for layer, heads in enumerate(matrix_uses(model, IDS)):
        norms = state[f"layers.{layer}.matrix"][0].norm(dim=(1, 2))
        assert [head.norm for head in heads] == pytest.approx(norms.tolist(), rel=1e-4)


def test_a_text_on_top_of_a_state_ends_as_the_whole_text(model: Rwkv7Model) -> None:
    _, before = model.forward(torch.tensor([IDS[:20]]), model.initial_state(1))
    whole, rest = matrix_uses(model, IDS), matrix_uses(model, IDS[20:], before)
    assert [head.norm for heads in rest for head in heads] == pytest.approx(
        [head.norm for heads in whole for head in heads], rel=1e-4
    )


def test_decays_that_no_token_changes_are_those_of_the_weights() -> None:
    """Without the low-rank part of the decay, w is exp(-e^-0.5 sigmoid(w0)) at every token."""
    tensors = random_tensors(CONFIG)
    for layer in range(CONFIG.num_layers):
        tensors[f"blocks.{layer}.att.w2"] = torch.zeros_like(tensors[f"blocks.{layer}.att.w2"])
    for layer, heads in enumerate(matrix_uses(Rwkv7Model(CONFIG, tensors), IDS)):
        base = tensors[f"blocks.{layer}.att.w0"].reshape(CONFIG.num_heads, CONFIG.head_size)
        rates = MAX_DECAY * base.double().sigmoid()
        assert [head.decay for head in heads] == pytest.approx((-rates.mean(dim=1)).exp().tolist(), rel=1e-4)
        lives = math.log(2) / rates.median(dim=1).values
        assert [head.half_life for head in heads] == pytest.approx(lives.tolist(), rel=1e-4)


def test_progress_is_reported_and_the_models_own_scan_stays(model: Rwkv7Model) -> None:
    seen: list[int] = []
    scan = model.scan
    matrix_uses(model, IDS, progress=seen.append)
    assert seen == [PIECE_LEN, 2 * PIECE_LEN, len(IDS)]
    assert model.scan is scan
