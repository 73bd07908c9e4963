"""Slots that exchange what they hold: when, how much, and what stays true of them."""

from __future__ import annotations

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.communicating import CommunicatingMixer, Communication
from nsm_core.model.segments import Segments

SHAPE = {"d_model": 16, "num_heads": 2, "num_memory_slots": 8, "write_top_k": 3, "communication_interval": 64}


def make_mixer(top_k: int = 0) -> CommunicatingMixer:
    torch.manual_seed(5)
    mixer = CommunicatingMixer(ModelConfig(layer_pattern="C", communication_top_k=top_k, **SHAPE))
    mixer.initial_slots.data.normal_()
    return mixer.requires_grad_(False)


@pytest.mark.parametrize("top_k", [0, 3])
def test_an_exchange_happens_after_every_interval_and_nowhere_else(top_k: int) -> None:
    """Positions 63 and 127 end an interval: the layer equals the plain one with the exchange by hand there."""
    mixer, x = make_mixer(top_k), torch.randn(1, 150, 16)
    out, state = mixer(x, mixer.initial_state(1), Segments(torch.arange(150)[None]))
    by_hand, pieces = mixer.initial_state(1), []
    for start, end in ((0, 64), (64, 128), (128, 150)):
        plain = super(CommunicatingMixer, mixer)
        mixer.interval = 10**6
        piece, by_hand = plain.forward(x[:, start:end], by_hand, Segments(torch.arange(start, end)[None]))
        mixer.interval = 64
        if end < 150:
            by_hand["slots"] = mixer.communication(by_hand["slots"])
        pieces.append(piece)
    torch.testing.assert_close(out, torch.cat(pieces, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["slots"], by_hand["slots"], rtol=1e-4, atol=1e-5)


def test_what_slots_hold_stays_in_the_hull_of_what_they_held() -> None:
    mixer = make_mixer()
    slots = torch.randn(3, 2, 8, 16)
    mixed = mixer.communication(slots)
    assert (mixed <= slots.amax(dim=2, keepdim=True) + 1e-6).all()
    assert (mixed >= slots.amin(dim=2, keepdim=True) - 1e-6).all()


def test_a_sparse_exchange_has_few_partners_and_is_continuous() -> None:
    exchange: Communication = make_mixer(top_k=3).communication
    slots = torch.randn(50, 2, 8, 16)
    weights = exchange.weights(slots)
    assert ((weights > 0).sum(-1) <= 3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, 2, 8))
    assert (weights - exchange.weights(slots * (1 + 1e-6))).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"communication_interval": 100}, "multiple of 64, got 100"), ({"communication_top_k": 9}, r"0 \(all\) to .*8")],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(layer_pattern="C", **{**SHAPE, **wrong})
