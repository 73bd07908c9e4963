"""Imports torch for a server on a CPU: without the registrations that only compilers and exporters use."""

from __future__ import annotations

import importlib
import sys
import types

# How operators compute shapes on the device `meta`: 0.2 s of CPU time and 18 MiB, which `import torch` always pays
META_KERNELS = "torch._meta_registrations"


def import_torch() -> types.ModuleType:
    """torch; if it is imported here for the first time, without META_KERNELS where its build knows no GPUs.

    A later import of that module registers them, as `complete_torch` does.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"]
    placeholder = sys.modules.setdefault(META_KERNELS, types.ModuleType(META_KERNELS))
    try:
        torch = importlib.import_module("torch")
    finally:
        del sys.modules[META_KERNELS]
    package, _, name = META_KERNELS.rpartition(".")
    if vars(sys.modules[package]).get(name) is placeholder:
        delattr(sys.modules[package], name)
    if torch.version.cuda is not None or torch.version.hip is not None:
        complete_torch()
    return torch


def complete_torch() -> None:
    """Registers what `import_torch` left out, for those who compile or export."""
    importlib.import_module(META_KERNELS)
