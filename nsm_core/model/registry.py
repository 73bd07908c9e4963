"""The kinds of layers a model may be made of, by their letter in `ModelConfig.layer_pattern`."""

from __future__ import annotations

from collections.abc import Callable

from nsm_core.config import ModelConfig
from nsm_core.model.attention import WindowAttention
from nsm_core.model.gated import GatedMixer
from nsm_core.model.mixer import Mixer
from nsm_core.model.pulse import PulseMixer

MIXERS: dict[str, Callable[[ModelConfig], Mixer]] = {
    "N": PulseMixer,
    "G": GatedMixer,
    "W": lambda config: WindowAttention(config, config.window),
    "A": lambda config: WindowAttention(config, config.max_context),
}


def build_mixers(config: ModelConfig) -> list[Mixer]:
    """One mixer a layer: the pattern, repeated as often as the layers need."""
    pattern = config.layer_pattern
    return [MIXERS[pattern[layer % len(pattern)]](config) for layer in range(config.num_layers)]
