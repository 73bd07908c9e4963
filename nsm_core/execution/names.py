"""The names of executors and devices. No torch here: settings use them."""

from __future__ import annotations

import re
from typing import Literal, get_args

# auto: native or native-int4 on a CPU where the model's file is int8 or int4, cuda on a GPU, eager elsewhere; of RWKV-7
# native-fp32 for other files. cuda: with bf16 matrices
ExecutorName = Literal[
    "auto",
    "eager",
    "native",
    "native-int4",
    "native-fp16-states",
    "native-int4-fp16-states",
    "native-fp32",
    "cuda",
    "cuda-fp16",
    "cuda-fp32",
]
EXECUTOR_NAMES: tuple[ExecutorName, ...] = get_args(ExecutorName)

AUTO_DEVICE = "auto"  # a GPU whose kernels pass their check, else the CPU
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)


def check_device_name(name: str) -> str:
    """The name itself. Raises ValueError for anything but `auto`, `cpu`, `cuda` and `cuda:N`."""
    if "," in name:
        raise ValueError("must be one device: an engine runs on one, so start a server for each GPU")
    if not _DEVICE.fullmatch(name):
        raise ValueError("must be auto, cpu, cuda, or a GPU by its number as cuda:1")
    return name
