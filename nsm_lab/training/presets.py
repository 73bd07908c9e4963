"""Models by name, for `--preset`. `python -m nsm_lab.training.presets` prints the table of docs/model.md."""

from __future__ import annotations

import dataclasses
import sys

import torch

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.model.nsm import NsmModel

_PULSE = ModelConfig(router="sigmoid", write_top_k=64)
_HYBRID = dataclasses.replace(_PULSE, layer_pattern="NNNW", window=1024, num_kv_heads=2, mlp_hidden=1568)

# The literature's variants, by its names, with its router; `hybrid` is among ours.
_SIMPLE = ModelConfig()
_WITH_WINDOW = dataclasses.replace(_SIMPLE, window=1024, num_kv_heads=2)


def _of_size(num_states: int, d_model: int, num_layers: int, mlp_hidden: int) -> ModelConfig:
    """A pulse-<num_states>: heads are 64 wide."""
    return dataclasses.replace(
        _PULSE,
        num_memory_slots=num_states,
        write_top_k=num_states,
        d_model=d_model,
        num_heads=d_model // 64,
        num_kv_heads=d_model // 64,
        num_layers=num_layers,
        mlp_hidden=mlp_hidden,
    )


# The literature's sizes: about 12, 24 and 48 million parameters, which states alone do not make: width and depth do.
_SIZES = {32: _of_size(32, 320, 7, 768), 64: _of_size(64, 448, 7, 1216), 128: _of_size(128, 576, 8, 1696)}


def _gated(config: ModelConfig) -> ModelConfig:
    """Of the same width and depth: the literature's routed softmax and GRU."""
    return dataclasses.replace(config, layer_pattern="G", router="softmax", write_top_k=config.num_memory_slots // 8)


# All but `tiny`, `small` and those named by their states have 34.6 to 34.7 million parameters; the feed-forward width
# makes up for what the mixers of a kind have more or less. `hybrid` is the bundled model's shape; `sliding-window`
# carries as many bytes.
PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=2048, d_model=128, num_layers=4, num_heads=4, num_memory_slots=32, write_top_k=4, mlp_hidden=384
    ),
    "small": dataclasses.replace(
        _HYBRID, d_model=256, num_layers=4, num_heads=4, num_kv_heads=1, window=512, mlp_hidden=704
    ),
    "base": _PULSE,
    "hybrid": _HYBRID,
    "keyed-hybrid": dataclasses.replace(
        _HYBRID,
        layer_pattern="KKKW",
        num_memory_slots=128,
        write_top_k=128,
        slot_width=128,
        window=128,
        mlp_hidden=1344,
    ),
    "sliding-window": ModelConfig(layer_pattern="W", num_kv_heads=2, window=460, mlp_hidden=2048),
    "transformer": ModelConfig(layer_pattern="A", max_context=1024, mlp_hidden=1792),
    "simple": _SIMPLE,
    "advanced-hybrid": dataclasses.replace(
        _WITH_WINDOW, layer_pattern="[NW][NW][NW][CW]", timescale_groups=4, mlp_hidden=968
    ),
    "sequential-hybrid": dataclasses.replace(_WITH_WINDOW, layer_pattern="(WNL)", num_layers=6, mlp_hidden=1120),
    "memory-augmented": dataclasses.replace(_SIMPLE, layer_pattern="NNN(NM)NNNN", mlp_hidden=1336),
    **{f"pulse-{states}": config for states, config in _SIZES.items()},
    **{f"nsm-{states}": _gated(config) for states, config in _SIZES.items()},
}


@dataclasses.dataclass(frozen=True, slots=True)
class PresetSize:
    """What a preset amounts to, counted on a model that holds no numbers."""

    num_parameters: int
    state_bytes: int


def size_of(config: ModelConfig) -> PresetSize:
    """Needs no memory to speak of."""
    with torch.device("meta"):
        model = NsmModel(config)
    return PresetSize(sum(weight.numel() for weight in model.parameters()), model.state_spec.num_bytes)


def table() -> str:
    """Markdown: a row a preset."""
    lines = [
        "| preset | layers | width | slots a head | router | parameters | state, fp32 |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for name, config in PRESETS.items():
        size = size_of(config)
        kinds = {kind for plan in parse_layer_pattern(config.layer_pattern) for kind in plan.kinds}
        slots = str(config.num_memory_slots) if kinds & set("NCGK") else "–"
        router = _router(config) if kinds & set("NCG") else "–"
        lines.append(
            f"| `{name}` | `{config.layer_pattern}` x {config.num_layers} | {config.d_model} | {slots} | {router} "
            f"| {size.num_parameters / 1e6:.2f}M | {size.state_bytes / 2**20:.2f} MiB |"
        )
    return "\n".join(lines)


def _router(config: ModelConfig) -> str:
    return "sigmoid" if config.router == "sigmoid" else f"softmax, {config.write_top_k} of {config.num_memory_slots}"


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
