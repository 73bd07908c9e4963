"""The layers that are compared on state tracking, by name, and what a model of one of them is."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.registry import register_layer
from nsm_lab.baselines.register import register_baselines

REFLECTING = "k"


class ReflectingKeyedMixer(KeyedMixer):
    """Keyed slots whose strength lies in (0, 2): a write of more than 1 turns the answer for its key around.

    A factor 1 - b below zero is what lets a delta rule follow parity (Grazzi et al. 2024, arXiv 2411.12537).
    """

    def _rates(self, x: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        rates = super()._rates(x, valid)
        return {**rates, "strength": 2.0 * rates["strength"]}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A row of the comparison: its title and what differs from BASE."""

    title: str
    changes: dict[str, object]


BASE: dict[str, object] = {
    "d_model": 64,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "num_memory_slots": 16,
    "write_top_k": 16,
    "router": "sigmoid",
    "mlp_hidden": 128,
    "window": 64,
}
LAYERS: dict[str, Layer] = {
    "lstm": Layer("LSTM", {"layer_pattern": "l"}),
    "gru-slots": Layer(
        "NSM, GRU gate at every token",
        {"layer_pattern": "G", "gate": "gru", "gate_chunk": 1, "num_memory_slots": 4, "write_top_k": 4},
    ),
    "slots": Layer("NSM, linear gate, softmax router", {"layer_pattern": "N", "router": "softmax", "write_top_k": 4}),
    "gsa": Layer("NSM, linear gate, sigmoid router (as in GSA)", {"layer_pattern": "N"}),
    "keyed": Layer("keyed slots", {"layer_pattern": "K"}),
    "keyed-2": Layer("keyed slots, strength up to 2", {"layer_pattern": REFLECTING}),
    "rwkv7": Layer("RWKV-7's time mix", {"layer_pattern": "r"}),
    "deltanet": Layer("Gated DeltaNet", {"layer_pattern": "g"}),
    "mamba2": Layer("Mamba-2", {"layer_pattern": "m"}),
    "window": Layer("attention to 64 tokens", {"layer_pattern": "W"}),
    "ntm": Layer("NTM's memory", {"layer_pattern": "M", "gate_chunk": 1, "memory_rows": 32, "memory_width": 32}),
}


def model_config(layer: str, num_tokens: int, num_layers: int = 1) -> ModelConfig:
    """The model with `num_layers` of a layer of LAYERS."""
    changes: dict[str, object] = {"vocab_size": num_tokens, "num_layers": num_layers}
    return ModelConfig.from_dict({**BASE, **LAYERS[layer].changes, **changes})


def register_layers() -> None:
    """Makes the letters of all layers known."""
    register_baselines()
    register_layer(REFLECTING, ReflectingKeyedMixer)
