"""Matrices in int8 with a scale for each row, as this project's own files hold them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

CHUNK_ROWS = 2048  # that are in fp32 at a time: a large matrix in half precision is rounded in little more memory

LARGEST = 127  # of a rounded row


@dataclasses.dataclass(frozen=True, slots=True)
class Int8Rows:
    """A matrix as its file has it: numbers [R, C] int8, scale [R] fp32."""

    numbers: Tensor
    scale: Tensor

    def dense(self) -> Tensor:
        """The weights [R, C] fp32."""
        return self.numbers.float().mul_(self.scale[:, None])

    def quantized(self) -> tuple[Tensor, Tensor]:
        """`quantize_rows(self.dense())`, to the bit, without the weights in fp32 if each row uses the whole range."""
        if len(self.scale) == 0 or self.numbers.shape[1] == 0:
            return quantize_rows(self.dense())
        least, most = self.numbers.amin(dim=1).to(torch.int16), self.numbers.amax(dim=1).to(torch.int16)
        if not bool((torch.maximum(-least, most) == LARGEST).all()):
            return quantize_rows(self.dense())
        return self.numbers, (self.scale.float() * LARGEST).clamp(min=1e-12) / LARGEST


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C, ...] float -> int8 of that shape and fp32 scale [R, ...]: symmetric, absolute maximum along C."""
    if len(weight) <= CHUNK_ROWS:
        return _quantize(weight.float())
    # Whole from the start: pieces of the result between what a chunk frees would keep that memory from the next one
    numbers = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = torch.empty(weight.shape[:1] + weight.shape[2:], dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), CHUNK_ROWS):
        chunk = slice(first, first + CHUNK_ROWS)
        numbers[chunk], scale[chunk] = _quantize(weight[chunk].float())
    return numbers, scale


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(dim=1).clamp(min=1e-12) / LARGEST
    return (rows / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale
