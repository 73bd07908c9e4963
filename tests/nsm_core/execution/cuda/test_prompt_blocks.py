"""The blocks for prompts against those that they are made of, on states that are not the start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the compiler is not installed")
from nsm_core.execution.cuda.prompts import prompt_model
from nsm_core.state.spec import POSITION
from tests.support.models import random_model, small_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-6 if DEVICE == "cpu" else 2e-5  # relative, of fp32
NUM_TOKENS = 19  # more than one tile, and not a whole one


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_pattern": "K", "num_memory_slots": 32, "slot_width": 64},
        {"layer_pattern": "W", "window": 10},
    ],
    ids=["keyed slots", "window"],
)
@pytest.mark.parametrize("is_ragged", [False, True], ids=["whole rows", "ragged"])
@torch.inference_mode()
def test_a_block_for_prompts_is_the_plain_one(changes: dict[str, object], is_ragged: bool) -> None:
    torch.manual_seed(0)
    model = random_model(small_config(48, num_layers=1, **changes)).to(DEVICE)
    state = {
        name: torch.randn_like(value) if value.is_floating_point() else torch.tensor([3, 1000], device=DEVICE)
        for name, value in model.initial_state(2).items()
    }
    lengths = torch.tensor([NUM_TOKENS, 2], device=DEVICE) if is_ragged else None
    valid = None if lengths is None else torch.arange(NUM_TOKENS, device=DEVICE) < lengths[:, None]
    ids = torch.randint(48, (2, NUM_TOKENS), device=DEVICE)
    want, want_state = model.read(ids, state, lengths=lengths, valid=valid)
    got, got_state = prompt_model(model, torch.float32).read(ids, state, lengths=lengths, valid=valid)
    if valid is not None:
        got, want = got[valid], want[valid]
    assert relative_error(got, want) < TOLERANCE
    assert got_state[POSITION].equal(want_state[POSITION])
    assert set(got_state) == set(want_state)
    for name in want_state:
        assert relative_error(got_state[name], want_state[name]) < TOLERANCE, name
