"""The names of executors. No torch here: settings use them."""

from __future__ import annotations

from typing import Literal, get_args

# auto: native on a CPU where the model's file is int8, cuda on a GPU, eager elsewhere. cuda: with bf16 matrices
ExecutorName = Literal["auto", "eager", "native", "cuda", "cuda-fp16", "cuda-fp32"]
EXECUTOR_NAMES: tuple[ExecutorName, ...] = get_args(ExecutorName)
