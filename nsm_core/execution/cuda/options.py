"""Options of the executor for GPUs, and the models that it supports. Imports neither kernels nor their compiler."""

from __future__ import annotations

import dataclasses
import enum

import torch

from nsm_core.config import ModelConfig
from nsm_core.model.attention import WindowAttention
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.ops.dispatch import runs_kernels

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
    """`graphs`: record the launches of a step once and replay them; else every step launches them one by one.

    `capture_at_start`: record all sizes when the executor is made, not at the first batch of each size.
    """

    weights: CudaWeights = CudaWeights.BF16
    graphs: bool = True
    capture_at_start: bool = False


def numerics(weights: CudaWeights, device: torch.device) -> str:
    """The class within which equal input gives equal bits."""
    return f"cuda/{weights}/kernels-2/torch-{torch.__version__}/{torch.cuda.get_device_name(device)}"


def cuda_unsupported_reason(model: object) -> str | None:
    """The reason why the executor for GPUs cannot run the model; None if it can."""
    if not isinstance(model, NsmModel):
        return f"there are none for models of the class {type(model).__name__}"
    if not runs_kernels(model.embedding.weight):
        return "it is not on a GPU, or the kernels' compiler (triton) is not installed"
    kinds = {type(block.mixer) for block in model.layers} - {PulseMixer, WindowAttention}
    if kinds:
        return f"it has layers without such kernels: {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if model.config.projector != "attention":
        return f"it reads slots by the projector {model.config.projector}, the kernels by attention alone"
    if (
        any(isinstance(block.mixer, PulseMixer) for block in model.layers)
        and _slot_tile(model.config) > LARGEST_SLOT_TILE
    ):
        return f"a head's slots have more than {LARGEST_SLOT_TILE} numbers, which must fit into registers"
    windows = [block.mixer.window for block in model.layers if isinstance(block.mixer, WindowAttention)]
    if max(windows, default=0) > LARGEST_WINDOW:
        return f"its window is larger than {LARGEST_WINDOW}"
    return None


def _slot_tile(config: ModelConfig) -> int:
    """Numbers in the keys of a head's slots, as one program holds them."""
    return _power_of_two(config.num_memory_slots) * _power_of_two(config.head_dim)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
