"""Resolves `auto` for devices and precisions."""

from __future__ import annotations

import torch

from nsm_core.errors import ConfigError


def resolve_device(requested: str) -> str:
    """The GPU if there is one for `auto`, else `requested` itself. Raises ConfigError for an unusable device."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=requested)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f"device {requested!r} cannot be used: {str(error).splitlines()[0]}") from error
    return requested


def resolve_precision(requested: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 on a CPU."""
    if requested != "auto":
        return requested
    return "bf16" if device.startswith("cuda") else "fp32"
