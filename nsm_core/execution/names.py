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

_OF_KIND: dict[tuple[str, str], ExecutorName] = {
    ("cpu", "int8"): "native",
    ("cpu", "int4"): "native-int4",
    ("cpu", "fp32"): "native-fp32",
    ("cuda", "bf16"): "cuda",
    ("cuda", "fp16"): "cuda-fp16",
    ("cuda", "fp32"): "cuda-fp32",
}
_WITH_HALF_STATES: dict[ExecutorName, ExecutorName] = {
    "native": "native-fp16-states",
    "native-int4": "native-int4-fp16-states",
}

AUTO_DEVICE = "auto"  # a GPU whose kernels pass their check, else the CPU
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)


def executor_of_numerics(numerics: str) -> ExecutorName | None:
    """The executor that computes in a numerics class, by the class's name; None for a class that is not known."""
    device, _, rest = numerics.partition("/")
    precision, _, build = rest.partition("/")
    if build.startswith("torch-"):
        return "eager"
    name = _OF_KIND.get((device, precision))
    return _WITH_HALF_STATES.get(name) if name and build.endswith("/fp16-states") else name


def device_names(value: str) -> tuple[str, ...]:
    """The devices of a list with commas; a single one may be `auto`. Raises ValueError."""
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        check_device_name(name)
    if len(names) > 1 and AUTO_DEVICE in names:
        raise ValueError("must name each device of a list, without auto")
    gpus = ["cuda:0" if name == "cuda" else name for name in names if name != "cpu"]
    if len(set(gpus)) < len(gpus):
        raise ValueError("must name each GPU once")
    return names


def check_device_name(name: str) -> str:
    """The name itself. Raises ValueError for anything but `auto`, `cpu`, `cuda` and `cuda:N`."""
    if "," in name:
        raise ValueError("must be one device here")
    if not _DEVICE.fullmatch(name):
        raise ValueError("must be auto, cpu, cuda, or a GPU by its number as cuda:1")
    return name
