"""What `auto` means on this machine."""

from __future__ import annotations

import torch

from nsm_core.errors import ConfigError


def resolve_device(wish: str) -> str:
    """The device that `auto` means here, or `wish` itself. Raises ConfigError for one that cannot be used."""
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wish)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f"device {wish!r} cannot be used: {str(error).splitlines()[0]}") from error
    return wish


def resolve_precision(wish: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 on a CPU."""
    if wish != "auto":
        return wish
    return "bf16" if device.startswith("cuda") else "fp32"
