"""Resolves `auto` for precisions."""

from __future__ import annotations


def resolve_precision(requested: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 on a CPU."""
    if requested != "auto":
        return requested
    return "bf16" if device.startswith("cuda") else "fp32"
