"""The kinds of layers a model may be made of, by their letter in `ModelConfig.layer_pattern`."""

from __future__ import annotations

from collections.abc import Callable

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.layer_pattern import LayerPlan, parse_layer_pattern
from nsm_core.model.allocating import AllocatingMixer
from nsm_core.model.attention import WindowAttention
from nsm_core.model.communicating import CommunicatingMixer
from nsm_core.model.composite import ParallelMixer, SequentialMixer
from nsm_core.model.gated import GatedMixer
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.memory import MemoryMixer
from nsm_core.model.mixer import Mixer
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.recurrence import LinearRecurrence

MixerFactory = Callable[[ModelConfig], Mixer]

MIXERS: dict[str, MixerFactory] = {
    "N": lambda config: AllocatingMixer(config) if config.allocation else PulseMixer(config),
    "C": lambda config: (
        AllocatingMixer(config, is_communicating=True) if config.allocation else CommunicatingMixer(config)
    ),
    "G": GatedMixer,
    "K": KeyedMixer,
    "L": LinearRecurrence,
    "W": lambda config: WindowAttention(config, config.window),
    "A": lambda config: WindowAttention(config, config.max_context),
    "M": MemoryMixer,
}
_registered: dict[str, MixerFactory] = {}


def register_layer(letter: str, factory: MixerFactory) -> None:
    """Makes a layer of another package available under a small letter of `layer_pattern`.

    Call it before a model with this letter is made. A second call with the same factory changes nothing. Raises
    ValueError for anything but a letter from a to z, and for a letter that has another factory.
    """
    if not (len(letter) == 1 and "a" <= letter <= "z"):
        raise ValueError(f"a registered layer has one letter from a to z, got {letter!r}")
    if _registered.setdefault(letter, factory) is not factory:
        raise ValueError(f"the layer {letter!r} is registered with another factory")


def build_mixers(config: ModelConfig) -> list[Mixer]:
    """One mixer a layer: the pattern, repeated as often as the layers need. Raises ConfigError for unknown letters."""
    plans = parse_layer_pattern(config.layer_pattern)
    return [_build(config, plans[layer % len(plans)]) for layer in range(config.num_layers)]


def _build(config: ModelConfig, plan: LayerPlan) -> Mixer:
    mixers = [_factory(config, kind)(config) for kind in plan.kinds]
    if len(mixers) == 1:
        return mixers[0]
    return ParallelMixer(config, mixers) if plan.in_parallel else SequentialMixer(config, mixers)


def _factory(config: ModelConfig, kind: str) -> MixerFactory:
    factory = MIXERS.get(kind) or _registered.get(kind)
    if factory is None:
        raise ConfigError(
            f"layer_pattern {config.layer_pattern!r} has the layer {kind!r}, which is not registered here: "
            "baselines are for training, evaluation, export and benchmarks (pip install 'nsm-serve[lab]'), not served"
        )
    return factory
