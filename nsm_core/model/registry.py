"""The kinds of layers a model may be made of, by their letter in `ModelConfig.layer_pattern`."""

from __future__ import annotations

from collections.abc import Callable

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import LayerPlan, parse_layer_pattern
from nsm_core.model.allocating import AllocatingMixer
from nsm_core.model.attention import WindowAttention
from nsm_core.model.baselines.diagonal import S5, S4d
from nsm_core.model.baselines.linformer import Linformer
from nsm_core.model.baselines.lstm import Lstm
from nsm_core.model.baselines.mamba2 import Mamba2
from nsm_core.model.baselines.performer import Performer
from nsm_core.model.baselines.rwkv7 import Rwkv7
from nsm_core.model.communicating import CommunicatingMixer
from nsm_core.model.composite import ParallelMixer, SequentialMixer
from nsm_core.model.gated import GatedMixer
from nsm_core.model.memory import MemoryMixer
from nsm_core.model.mixer import Mixer
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.recurrence import LinearRecurrence

MIXERS: dict[str, Callable[[ModelConfig], Mixer]] = {
    "N": lambda config: AllocatingMixer(config) if config.allocation else PulseMixer(config),
    "C": lambda config: (
        AllocatingMixer(config, is_communicating=True) if config.allocation else CommunicatingMixer(config)
    ),
    "G": GatedMixer,
    "L": LinearRecurrence,
    "W": lambda config: WindowAttention(config, config.window),
    "A": lambda config: WindowAttention(config, config.max_context),
    "M": MemoryMixer,
    "l": Lstm,
    "f": Linformer,
    "p": Performer,
    "r": Rwkv7,
    "m": Mamba2,
    "d": S4d,
    "s": S5,
}


def build_mixers(config: ModelConfig) -> list[Mixer]:
    """One mixer a layer: the pattern, repeated as often as the layers need."""
    plans = parse_layer_pattern(config.layer_pattern)
    return [_build(config, plans[layer % len(plans)]) for layer in range(config.num_layers)]


def _build(config: ModelConfig, plan: LayerPlan) -> Mixer:
    mixers = [MIXERS[kind](config) for kind in plan.kinds]
    if len(mixers) == 1:
        return mixers[0]
    return ParallelMixer(config, mixers) if plan.in_parallel else SequentialMixer(config, mixers)
