"""Matrices in int4: numbers of 4 bits on grids of int8, a grid for each row and GROUP inputs, a scale for each row.

A weight is scale * (number * step + offset): number in [0, 15], step in [1, MAX_STEP], offset so that the whole grid
lies in [-127, 127]. A grid is of whole numbers, so a product with int8 inputs has one exact sum for a whole row.

In a file two numbers share a byte: 4.5 bits a weight with its grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a grid
MOST = 15  # the largest number
MAX_STEP = 16
LIMIT = 127  # of the grid
TOP = MAX_STEP * MOST // 2  # what a row's largest weight becomes: the widest grid reaches it on both sides of zero
CHUNK_ROWS = 512  # that are rounded at a time
# Grids that are tried: shares of a group's range that they span, and shares of a step that they are moved by.
SPANS = (1.0, 0.9, 0.8)
MOVES = (-1 / 3, 0.0, 1 / 3)


@dataclasses.dataclass(frozen=True, slots=True)
class Int4Rows:
    """numbers [R, C] uint8, steps [R, G] uint8, offsets [R, G] int8, scale [R] fp32; G: groups of GROUP inputs."""

    numbers: Tensor
    steps: Tensor
    offsets: Tensor
    scale: Tensor

    def grid(self) -> Tensor:
        """The weights without their scales: [R, C] int8."""
        num_cols = self.numbers.shape[1]
        steps, offsets = (_spread(part, num_cols).to(torch.int16) for part in (self.steps, self.offsets))
        return (self.numbers.to(torch.int16) * steps + offsets).to(torch.int8)

    def dense(self) -> Tensor:
        """The weights [R, C] fp32."""
        return self.grid().float() * self.scale[:, None]

    def first(self, num_rows: int | None) -> Int4Rows:
        """The first rows, all for None."""
        parts = (self.numbers, self.steps, self.offsets, self.scale)
        return Int4Rows(*(part[:num_rows].contiguous() for part in parts))

    def packed(self) -> PackedInt4:
        """As a file has it. Raises ValueError for a matrix that is not `is_packable`."""
        if not is_packable(tuple(self.numbers.shape)):
            raise ValueError(f"rows of {self.numbers.shape[1]} numbers do not fill their bytes")
        low, high = self.numbers[:, 0::2], self.numbers[:, 1::2]
        return PackedInt4(low | (high << 4), self.steps, self.offsets, self.scale)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedInt4:
    """Int4Rows as a file has them: of each byte [R, C/2] the lower half is the first of two numbers."""

    numbers: Tensor
    steps: Tensor
    offsets: Tensor
    scale: Tensor

    def rows(self) -> Int4Rows:
        """The same matrix with a byte for each number."""
        numbers = torch.stack((self.numbers & MOST, self.numbers >> 4), dim=-1).flatten(1)
        return Int4Rows(numbers, *(part.contiguous() for part in (self.steps, self.offsets, self.scale)))

    def dense(self) -> Tensor:
        """The weights [R, C] fp32."""
        return self.rows().dense()

    def fault(self) -> str | None:
        """What no kernel can compute with, in words; None for a sound matrix."""
        parts = (self.numbers, self.steps, self.offsets, self.scale)
        if [part.dtype for part in parts] != [torch.uint8, torch.uint8, torch.int8, torch.float32]:
            return "has other dtypes than uint8, uint8, int8 and float32"
        num_rows, num_bytes = self.numbers.shape if self.numbers.ndim == 2 else (-1, 0)
        groups = (num_rows, -(-2 * num_bytes // GROUP))
        if num_rows < 0 or [tuple(part.shape) for part in parts[1:]] != [groups, groups, (num_rows,)]:
            return "has grids or scales of other shapes than its numbers"
        lowest, step = self.offsets.to(torch.int16), self.steps.to(torch.int16)
        is_sound = (step >= 1) & (step <= MAX_STEP) & (lowest >= -LIMIT) & (lowest + MOST * step <= LIMIT)
        return None if bool(is_sound.all()) else "has a grid beyond int8"


def is_packable(shape: tuple[int, ...]) -> bool:
    """Whether a file can hold a tensor of this shape in int4: a matrix whose rows fill their bytes."""
    return len(shape) == 2 and shape[1] % 2 == 0


def quantize_int4(weight: Tensor) -> Int4Rows:
    """[R, C] float -> the grids of least squared error among those that are tried."""
    parts = [_quantize(part.float()) for part in torch.split(weight, CHUNK_ROWS)]
    fields = zip(*((part.numbers, part.steps, part.offsets, part.scale) for part in parts), strict=True)
    return Int4Rows(*(torch.cat(field) for field in fields))


def best_grids(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., GROUP] in [-TOP, TOP] -> step and offset [..., 1] of the least error."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    least = torch.full_like(low, torch.inf)
    best_step, best_offset = torch.ones_like(low), torch.zeros_like(low)
    for step, offset in _grids(low, high):
        total = (_nearest(values, step, offset) * step + offset - values).square_().sum(-1, keepdim=True)
        is_better = total < least
        least = torch.where(is_better, total, least)
        best_step, best_offset = torch.where(is_better, step, best_step), torch.where(is_better, offset, best_offset)
    return best_step, best_offset


def _quantize(rows: Tensor) -> Int4Rows:
    num_rows, num_cols = rows.shape
    scale = rows.abs().amax(dim=1).clamp(min=1e-12) / TOP
    missing = -num_cols % GROUP
    # A last group that is not full is filled with its own last number, which moves no border
    values = F.pad((rows / scale[:, None])[None], (0, missing), mode="replicate")[0].view(num_rows, -1, GROUP)
    step, offset = best_grids(values)
    numbers = _nearest(values, step, offset).flatten(1)[:, :num_cols]
    return Int4Rows(numbers.to(torch.uint8), step[..., 0].to(torch.uint8), offset[..., 0].to(torch.int8), scale)


def _grids(low: Tensor, high: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for span in SPANS:
        step = ((high - low) * (span / MOST)).round_().clamp_(1, MAX_STEP)
        for move in MOVES:
            offset = ((low + high - MOST * step) / 2 + move * step).round_()
            yield step, torch.minimum(offset.clamp_(min=-LIMIT), LIMIT - MOST * step)


def _nearest(values: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    return ((values - offset) / step).round_().clamp_(0, MOST)


def _spread(groups: Tensor, num_cols: int) -> Tensor:
    return groups.repeat_interleave(GROUP, dim=1)[:, :num_cols]
