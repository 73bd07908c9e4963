"""Matrices in int8 with a scale for each row, as this project's own files hold them."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C, ...] float -> int8 of that shape and fp32 scale [R, ...]: symmetric, absolute maximum along C."""
    scale = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127.0
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale
