"""Selects the implementation of an operator."""

from __future__ import annotations

import importlib.util

from torch import Tensor

_HAS_KERNELS = importlib.util.find_spec("triton") is not None


def has_compiler() -> bool:
    """Whether the compiler of the kernels is installed."""
    return _HAS_KERNELS


def runs_kernels(tensor: Tensor) -> bool:
    """Whether the kernels can work on this tensor: on a GPU, where their compiler is installed."""
    return _HAS_KERNELS and tensor.is_cuda
