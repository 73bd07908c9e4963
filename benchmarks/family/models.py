"""The models of the comparison: every variant of the family and the baselines, at nearly equal numbers of parameters.

A model is a layer pattern and a few settings; the width of its feed-forward parts makes up for what its mixers have
more or less than those of others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.model.nsm import NsmModel
from nsm_lab.baselines.register import register_baselines

register_baselines()

VOCABULARY = 256  # bytes
OURS, BASELINES = "ours", "baselines"
SIGMOID = {"router": "sigmoid"}  # writes to all slots
MIN_HIDDEN, HIDDEN_STEP = 16, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """What all models of a run share. `train_len`: tokens of a row in training; attention's window is half of it."""

    d_model: int
    num_layers: int
    num_heads: int
    num_memory_slots: int
    num_parameters: int
    train_len: int


SIZES = {
    "tiny": Size(64, 4, 2, 16, 400_000, 64),
    "small": Size(128, 4, 2, 32, 1_250_000, 256),
    "medium": Size(256, 4, 4, 64, 5_000_000, 512),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A model of the table: its pattern (repeated over the layers) and settings that differ from the defaults.

    Two of them go by the size: `slots_factor` multiplies its slots, of which one in `upper_part` is of the upper level.
    """

    label: str
    group: str
    layer_pattern: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


ENTRIES = {
    "simple": Entry("Simple (softmax router, top k)", OURS, "N"),
    "pulse": Entry("PULSE (sigmoid router)", OURS, "N", SIGMOID),
    "pulse-wide": Entry("PULSE, twice the slots", OURS, "N", SIGMOID | {"slots_factor": 2}),
    "direct": Entry("PULSE, direct projector", OURS, "N", SIGMOID | {"projector": "direct"}),
    "hybrid-projector": Entry("PULSE, hybrid projector", OURS, "N", SIGMOID | {"projector": "hybrid"}),
    "communicating": Entry("Simple, communicating", OURS, "NNNC"),
    "two-level": Entry("Simple, two levels", OURS, "NNNC", {"upper_part": 4}),
    "allocation": Entry("PULSE, slots that come and go", OURS, "N", SIGMOID | {"allocation": True, "start_slots": 8}),
    "keyed": Entry("Keyed slots", OURS, "K"),
    "gru": Entry("Simple, GRU gate", OURS, "G", {"gate": "gru"}),
    "lstm-gate": Entry("Simple, LSTM gate", OURS, "G", {"gate": "lstm"}),
    "free-gate": Entry("Simple, free gates", OURS, "G", {"gate": "free"}),
    "hybrid": Entry("Hybrid", OURS, "NNNW", SIGMOID),
    "advanced-hybrid": Entry("Advanced hybrid", OURS, "[NW][NW][NW][CW]", SIGMOID),
    "sequential-hybrid": Entry("Sequential hybrid", OURS, "(WNL)", SIGMOID),
    "memory-augmented": Entry("Memory-augmented", OURS, "NMNN", SIGMOID),
    "linear-recurrence": Entry("Linear recurrence (minGRU)", BASELINES, "L"),
    "sliding-window": Entry("Sliding-window attention", BASELINES, "W"),
    "transformer": Entry("Transformer", BASELINES, "A"),
    "linformer": Entry("Linformer, causal by blocks", BASELINES, "f"),
    "performer": Entry("Performer", BASELINES, "p"),
    "lstm": Entry("LSTM", BASELINES, "l"),
    "rwkv7": Entry("RWKV-7", BASELINES, "r"),
    "gated-deltanet": Entry("Gated DeltaNet", BASELINES, "g"),
    "mamba2": Entry("Mamba-2", BASELINES, "m"),
    "s4d": Entry("S4D", BASELINES, "d"),
    "s5": Entry("S5", BASELINES, "s"),
}


def sees_everything(config: ModelConfig) -> bool:
    """Whether its cache must grow with the text for it to be the model that it is."""
    kinds = {kind for plan in parse_layer_pattern(config.layer_pattern) for kind in plan.kinds}
    return bool(kinds & {"A", "f"})


@functools.cache
def config_of(name: str, size: Size, context: int) -> ModelConfig:
    """With `context` tokens in view where a model sees everything, and a feed-forward width that fits `size`."""
    config = _config(name, size, context, mlp_hidden=HIDDEN_STEP)
    missing = size.num_parameters - count_parameters(config)
    more = missing // (3 * size.d_model * size.num_layers)
    hidden = max(MIN_HIDDEN, HIDDEN_STEP + more // HIDDEN_STEP * HIDDEN_STEP)
    return dataclasses.replace(config, mlp_hidden=hidden)


def _config(name: str, size: Size, context: int, mlp_hidden: int) -> ModelConfig:
    entry = ENTRIES[name]
    fields = dict(entry.fields)
    slots = size.num_memory_slots * fields.pop("slots_factor", 1)
    if "upper_part" in fields:
        fields["upper_slots"] = slots // fields.pop("upper_part")
    is_dense = fields.get("router") == "sigmoid"
    return ModelConfig(
        layer_pattern=entry.layer_pattern,
        vocab_size=VOCABULARY,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_kv_heads=size.num_heads,
        num_memory_slots=slots,
        write_top_k=slots if is_dense else max(1, slots // 8),
        mlp_hidden=mlp_hidden,
        window=size.train_len // 2,
        max_context=context,
        communication_interval=max(64, size.train_len // 4),
        **fields,
    )


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in NsmModel(config).parameters())


def build(name: str, size: Size, context: int, device: torch.device, seed: int = 0) -> NsmModel:
    torch.manual_seed(seed)
    return NsmModel(config_of(name, size, context)).to(device)
