"""Selects the implementation of an operator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_HAS_KERNELS = importlib.util.find_spec("triton") is not None


def has_compiler() -> bool:
    """Whether the compiler of the kernels is installed."""
    return _HAS_KERNELS


def runs_kernels(tensor: Tensor) -> bool:
    """Whether the kernels can work on this tensor: on a GPU, where their compiler is installed."""
    return _HAS_KERNELS and tensor.is_cuda


def operator_or_function(operator: Callable[..., Result], function: Callable[..., Result]) -> Callable[..., Result]:
    """What to call of an operator and the function that it was made of: the function where nothing is differentiated or
    compiled. The first call of an operator imports torch's compiler, half a second of a start.
    """
    is_plain = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return function if is_plain else operator
