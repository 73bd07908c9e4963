"""Matrices in int8 with a scale for each row, as this project's own files hold them."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ROWS = 2048  # that are in fp32 at a time: a large matrix in half precision is rounded in little more memory


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C, ...] float -> int8 of that shape and fp32 scale [R, ...]: symmetric, absolute maximum along C."""
    parts = [_quantize(part.float()) for part in torch.split(weight, CHUNK_ROWS)]
    numbers, scales = zip(*parts, strict=True)
    return (torch.cat(numbers), torch.cat(scales)) if len(parts) > 1 else parts[0]


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(dim=1).clamp(min=1e-12) / 127.0
    return (rows / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale
