"""Keyed slots: routes, and what a head answers after it was written to."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.keyed import STRENGTH_RANGE, KeyedMixer, crowding, unit_route
from nsm_core.model.segments import Segments

CONFIG = ModelConfig(vocab_size=50, d_model=32, num_layers=1, num_heads=2, num_memory_slots=16, write_top_k=4,
                     layer_pattern="K", mlp_hidden=32, slot_width=8)  # fmt: skip


def test_route_has_unit_length_at_any_size_of_logits() -> None:
    torch.manual_seed(0)
    for size in (0.01, 1.0, 300.0):
        route = unit_route(size * torch.randn(50, 16))
        torch.testing.assert_close(route.norm(dim=-1), torch.ones(50))


@torch.no_grad()
def test_keyed_mixer_writes_where_the_token_before_read() -> None:
    """At the start the write taps are the read taps, one token later."""
    torch.manual_seed(0)
    mixer = KeyedMixer(CONFIG)
    mixer.conv.write.copy_(mixer.conv.read.roll(-1, dims=0))
    mixer.conv.write[-1] = 0.0
    mixer.conv.read[0] = 0.0
    x = torch.randn(1, 20, 32)
    tokens, _, _ = mixer.tokens(x, mixer.initial_state(1)["conv_tail"], Segments(torch.arange(20)[None]))
    torch.testing.assert_close(tokens["k"][:, 4:], tokens["q"][:, 3:-1])


@torch.no_grad()
def test_keyed_mixer_heads_start_with_strengths_of_all_horizons() -> None:
    mixer = KeyedMixer(CONFIG)
    mixer.rates.weight.zero_()
    rates = mixer._rates(torch.zeros(1, 1, 32), None)
    torch.testing.assert_close(rates["strength"].flatten(), torch.tensor(STRENGTH_RANGE))
    torch.testing.assert_close(rates["log_decay"].flatten(), torch.tensor([-1e-3, -1e-5]), rtol=1e-3, atol=1e-9)


def test_config_of_keyed_slots_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"slot_width must be 0 \(d_model / num_heads\) to 1048576, got -1"):
        ModelConfig(slot_width=-1)


def test_crowding_tells_routes_that_are_all_the_same_from_routes_that_are_spread_out() -> None:
    same = F.normalize(torch.ones(2, 50, 3, 8), dim=-1)
    assert float(crowding(same)) == pytest.approx(math.log(8))
    spread = torch.eye(8).repeat(4, 1)[:, None].expand(-1, 3, -1)[None]
    assert float(crowding(spread)) == pytest.approx(0.0, abs=1e-6)
