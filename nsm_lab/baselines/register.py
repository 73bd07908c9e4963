"""The letters of the baselines in `ModelConfig.layer_pattern`."""

from __future__ import annotations

from collections.abc import Mapping

from nsm_core.model.registry import register_layer
from nsm_lab.baselines.baseline import Baseline
from nsm_lab.baselines.diagonal import S5, S4d
from nsm_lab.baselines.gated_deltanet import GatedDeltaNet
from nsm_lab.baselines.linformer import Linformer
from nsm_lab.baselines.lstm import Lstm
from nsm_lab.baselines.mamba2 import Mamba2
from nsm_lab.baselines.performer import Performer
from nsm_lab.baselines.rwkv7 import Rwkv7

BASELINES: Mapping[str, type[Baseline]] = {
    "l": Lstm,
    "f": Linformer,
    "p": Performer,
    "r": Rwkv7,
    "m": Mamba2,
    "d": S4d,
    "s": S5,
    "g": GatedDeltaNet,
}


def register_baselines() -> None:
    """Lets models have baseline layers. Every command of the lab calls it before it makes or loads a model."""
    for letter, baseline in BASELINES.items():
        register_layer(letter, baseline)
