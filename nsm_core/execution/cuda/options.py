"""Options of the executor for GPUs, and the models that it supports. Imports neither kernels nor their compiler."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection

import torch

from nsm_core.config import ModelConfig
from nsm_core.model.attention import WindowAttention
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.ops.dispatch import runs_kernels
from nsm_core.ops.keyed_scan.operator import SUPPORTED_WIDTHS

LARGEST_SLOT_TILE = 16384
LARGEST_WINDOW = 16384


class CudaWeights(enum.StrEnum):
    """The dtype of products with large matrices. Router, gates, states and softmax are fp32 with each."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]

    @property
    def prompt_dtype(self) -> torch.dtype:
        """The dtype for prompts: bf16 also with fp16, because a chunk's decay factors exceed the range of fp16."""
        return torch.float32 if self is CudaWeights.FP32 else torch.bfloat16

    @property
    def ring_dtype(self) -> torch.dtype:
        """The dtype of windows' keys and values; bf16 holds those of bf16 prompts without loss."""
        return self.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """`graphs`: record the launches of a step once and replay them; else every step launches them one by one."""

    weights: CudaWeights = CudaWeights.BF16
    graphs: bool = True


def numerics(weights: CudaWeights, device: torch.device) -> str:
    """The class within which equal input gives equal bits."""
    return f"cuda/{weights}/kernels-4/torch-{torch.__version__}/{torch.cuda.get_device_name(device)}"


def cuda_unsupported_reason(model: object) -> str | None:
    """The reason why the executor for GPUs cannot run the model; None if it can."""
    if not isinstance(model, NsmModel):
        return f"there are none for models of the class {type(model).__name__}"
    if not runs_kernels(model.embedding.weight):
        return "it is not on a GPU, or the kernels' compiler (triton) is not installed"
    kinds = {type(block.mixer) for block in model.layers}
    unknown = kinds - {PulseMixer, KeyedMixer, WindowAttention}
    if unknown:
        return f"it has layers without such kernels: {', '.join(sorted(kind.__name__ for kind in unknown))}"
    if model.config.projector != "attention":
        return f"it reads slots by the projector {model.config.projector}, the kernels by attention alone"
    reason = _slots_unsupported_reason(kinds, model.config)
    if reason is not None:
        return reason
    windows = [block.mixer.window for block in model.layers if isinstance(block.mixer, WindowAttention)]
    if max(windows, default=0) > LARGEST_WINDOW:
        return f"its window is larger than {LARGEST_WINDOW}"
    return None


def _slots_unsupported_reason(kinds: Collection[type], config: ModelConfig) -> str | None:
    """Of layers of these kinds."""
    slots, width = config.num_memory_slots, config.slot_width or config.head_dim
    if KeyedMixer in kinds and not {slots, width} <= set(SUPPORTED_WIDTHS):
        allowed = ", ".join(map(str, SUPPORTED_WIDTHS))
        return f"it has {slots} keyed slots of {width} numbers a head, each must be one of {allowed}"
    # numbers that one program holds of a head: the slots' keys, or all of keyed ones
    tiles = {PulseMixer: _tile(slots, config.head_dim), KeyedMixer: _tile(slots, width)}
    if any(kind in kinds and tile > LARGEST_SLOT_TILE for kind, tile in tiles.items()):
        return f"a head's slots have more than {LARGEST_SLOT_TILE} numbers, which must fit into registers"
    return None


def _tile(rows: int, columns: int) -> int:
    return _power_of_two(rows) * _power_of_two(columns)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
