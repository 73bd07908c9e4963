"""The models of the figure: layers and how each reaches a number of state elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nsm_core.config import ModelConfig
from nsm_lab.evaluation.mqar.config import DEFAULT_MODEL

SIZES = (8192, 16384, 32768, 65536)  # numbers of memory in both layers together, without the convolutions' last tokens
LAYERS, HEAD_WIDTH = 2, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A layer of the figure. `shape(size)`: the fields of its model with `size` numbers of memory.

    `published`: what Zoology's figure shows for it, as (numbers of state, accuracy), read off to about 0.01.
    """

    title: str
    shape: Callable[[int], dict[str, object]]
    published: tuple[tuple[int, float], ...] = ()


def width(size: int) -> int:
    """Of all layers with `size` numbers: 128, and 256 for the largest, so that no head has more than 128 slots."""
    return 256 if size > 32768 else 128


def _slots(size: int) -> int:
    """Slots a head that hold keys and values."""
    return size // (2 * LAYERS * width(size))


def _sigmoid(size: int) -> dict[str, object]:
    return {"layer_pattern": "N", "router": "sigmoid", "num_memory_slots": _slots(size), "write_top_k": _slots(size)}


def _softmax(size: int) -> dict[str, object]:
    top_k = max(2, _slots(size) // 8)
    return {"layer_pattern": "N", "router": "softmax", "num_memory_slots": _slots(size), "write_top_k": top_k}


def _matrices(letter: str) -> Callable[[int], dict[str, object]]:
    """Heads of M x 64 numbers."""

    def shape(size: int) -> dict[str, object]:
        slots = size // (LAYERS * width(size))
        return {"layer_pattern": letter, "num_memory_slots": slots, "write_top_k": 1, "slot_width": HEAD_WIDTH}

    return shape


def _mamba2(size: int) -> dict[str, object]:
    return {"layer_pattern": "m", "num_memory_slots": _slots(size), "write_top_k": 1}


def _rwkv7(size: int) -> dict[str, object]:
    """Heads are square, so more state means wider heads."""
    heads = LAYERS * width(size) ** 2 // size
    return {"layer_pattern": "r", "num_heads": heads, "num_kv_heads": heads}


def _window(size: int) -> dict[str, object]:
    return {"layer_pattern": "W", "window": size // (2 * LAYERS * width(size))}


CURVES: dict[str, Curve] = {
    "keyed": Curve("NSM, keyed slots", _matrices("K")),
    "slots": Curve("NSM, slots, softmax router", _softmax),
    "gsa": Curve("NSM, slots, sigmoid router (GSA)", _sigmoid),
    "deltanet": Curve("Gated DeltaNet", _matrices("g"), ((17_000, 0.89), (66_000, 0.99))),
    "rwkv7": Curve("RWKV-7's time mix", _rwkv7, ((17_000, 0.82), (131_000, 0.92))),
    "mamba2": Curve("Mamba-2", _mamba2, ((16_000, 0.69), (65_000, 0.83))),
    "window": Curve("window attention", _window, ((34_000, 0.31), (66_000, 0.51))),
}


def model_config(curve: str, size: int) -> ModelConfig:
    """Two layers without feed-forward parts, as DEFAULT_MODEL."""
    heads = width(size) // HEAD_WIDTH
    shape = {"d_model": width(size), "num_heads": heads, "num_kv_heads": heads, **CURVES[curve].shape(size)}
    return ModelConfig.from_dict({**dataclasses.asdict(DEFAULT_MODEL), **shape})
