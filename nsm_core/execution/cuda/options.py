"""How a GPU computes a model, and whether it can. The kernels and their compiler are not imported here."""

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
    """What the large matrices are multiplied in. Router, gates, states and softmax are fp32 with each."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]

    @property
    def prompt_dtype(self) -> torch.dtype:
        """The same of prompts: bf16 with fp16 too, since the decay factors of a chunk pass the range of fp16."""
        return torch.float32 if self is CudaWeights.FP32 else torch.bfloat16

    @property
    def ring_dtype(self) -> torch.dtype:
        """What the keys and values of windows lie in: those of bf16 prompts without loss where it is bf16."""
        return self.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """`graphs`: record the launches of a step once and replay them; without, every step launches them one by one.

    `capture_at_start`: record all sizes when the executor is made, not when a batch of the size first comes.
    """

    weights: CudaWeights = CudaWeights.BF16
    graphs: bool = True
    capture_at_start: bool = False


def numerics(weights: CudaWeights, device: torch.device) -> str:
    """The class within which equal input gives equal bits."""
    return f"cuda/{weights}/kernels-2/torch-{torch.__version__}/{torch.cuda.get_device_name(device)}"


def why_not_cuda(model: NsmModel) -> str | None:
    """What keeps the model from the executor for GPUs; None where it can run."""
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
    """Keys of a head's slots, as many as a program holds."""
    return _power_of_two(config.num_memory_slots) * _power_of_two(config.head_dim)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
