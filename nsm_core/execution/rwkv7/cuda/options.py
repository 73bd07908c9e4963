"""The RWKV-7 models that the kernels for GPUs can run. Imports neither kernels nor their compiler."""

from __future__ import annotations

import torch

from nsm_core.execution.cuda.options import CudaWeights
from nsm_core.ops.dispatch import has_compiler
from nsm_core.rwkv7.model import Rwkv7Model

HEAD_SIZES = (16, 32, 64, 128)
WIDTH_UNIT = 16  # numbers that a thread reads at once begin at multiples of it


def rwkv7_numerics(weights: CudaWeights, device: torch.device) -> str:
    """The class within which equal input gives equal bits, at any batch and any cut of a text."""
    return f"cuda/{weights}/rwkv7-kernels-2/torch-{torch.__version__}/{torch.cuda.get_device_name(device)}"


def rwkv7_cuda_unsupported_reason(model: Rwkv7Model) -> str | None:
    """Why the kernels for GPUs cannot run the model, in words; None if they can."""
    if model.device.type != "cuda" or not has_compiler():
        return "it is not on a GPU, or the kernels' compiler (triton) is not installed"
    config = model.config
    if config.head_size not in HEAD_SIZES:
        return f"its heads have {config.head_size} channels, which must be one of {', '.join(map(str, HEAD_SIZES))}"
    for name in ("width", "hidden"):
        if getattr(config, name) % WIDTH_UNIT:
            return f"its {name} is {getattr(config, name)}, which must be a multiple of {WIDTH_UNIT}"
    return None
