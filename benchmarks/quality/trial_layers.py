"""Keyed slots and Gated DeltaNet with one thing changed, for trials (`benchmarks.quality.controls`).

Each is a layer under a letter of its own, so that training, saving and measuring treat it like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.mixer import Mixer
from nsm_core.model.registry import register_layer
from nsm_lab.baselines.gated_deltanet import GatedDeltaNet

SHORT_TIMESCALES = (1e1, 1e3)  # tokens, as usual in models of the literature; keyed slots start from 1e3 to 1e5


class UndecayedSlots(KeyedMixer):
    """Slots that no token writes to stay as they are: what a write removes is all that a head forgets."""

    def _rates(self, x: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        rates = super()._rates(x, valid)
        return {**rates, "log_decay": torch.zeros_like(rates["log_decay"])}


class ShortTimescales(KeyedMixer):
    """Heads whose decays start at tens to a thousand tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        low, high = (math.log(bound) for bound in SHORT_TIMESCALES)
        with torch.no_grad():
            decay = (-torch.linspace(low, high, self.heads)).exp()
            self.rates.bias[self.heads :] = decay + torch.log(-torch.expm1(-decay))


class SingleTokenRoutes(KeyedMixer):
    """The shift by one token without the convolution: a token reads with its own route alone and is written to that
    of the token before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for taps, position in ((self.conv.read, -1), (self.conv.write, -2), (self.conv.value, -1)):
            _fix_to_one(taps, position)


class UnmixedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet without its short convolutions: queries, keys and values of the token alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        _fix_to_one(self.conv_weight, -1)


TRIAL_LAYERS: Mapping[str, type[Mixer]] = {
    "u": UndecayedSlots,
    "t": ShortTimescales,
    "o": SingleTokenRoutes,
    "q": UnmixedDeltaNet,
}


def register_trial_layers() -> None:
    """Lets models have these layers in this process."""
    for letter, layer in TRIAL_LAYERS.items():
        register_layer(letter, layer)


@torch.no_grad()
def _fix_to_one(taps: torch.nn.Parameter, position: int) -> None:
    """Only the token at `position` counts, and training leaves it so."""
    taps.zero_()
    taps[position] = 1.0
    taps.requires_grad_(False)
