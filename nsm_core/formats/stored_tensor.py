"""A tensor that is still in its file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.formats.number_kinds import NumberKind
from nsm_core.formats.random_access import RandomAccessFile

MAX_DIMENSIONS = 8
CHUNK_BYTES = 4 << 20  # of quantised numbers that become floating point at a time

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Numbers of one kind at an offset, row after row, or `strides` numbers apart.

    Reading allocates what its shape says, which no file can make larger than its own numbers. Raises CheckpointError
    that names file and tensor if the file does not hold it.
    """

    file: RandomAccessFile
    name: str
    kind: NumberKind
    shape: Shape
    offset: int
    strides: Shape | None = None

    def __post_init__(self) -> None:
        sizes = (*self.shape, *(self.strides or ()))
        if len(self.shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
            raise self.error(f"has the shape {shown_shape(self.shape)}")
        if self.strides is not None and (len(self.strides) != len(self.shape) or self.count > self._span):
            raise self.error("has numbers that overlap")
        row = self.shape[-1] if self.shape else 1
        if row % self.kind.block != 0:
            raise self.error(f"has rows of {row} numbers, which is no multiple of {self.kind.block}")
        if not 0 <= self.offset <= self.file.size - self.num_bytes:
            raise self.error(
                f"takes {self.num_bytes} bytes at {self.offset}, and the file has {self.file.size}: "
                "it is cut short or damaged"
            )

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def _span(self) -> int:
        """Numbers from its first to its last in the file."""
        if self.strides is None or self.count == 0:
            return self.count
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self._span // self.kind.block * self.kind.num_bytes

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: the tensor {shown_name(self.name)} {what}")

    def read(self) -> Tensor:
        """The tensor on the CPU: in its own dtype, or fp32 if it is quantised."""
        if self.kind.dequantise is not None:
            return self._dequantised()
        flat = torch.empty(self._span, dtype=self.kind.dtype)
        self.file.read_into(self.offset, _bytes_of(flat))
        if self.strides is None:
            return flat.reshape(self.shape)
        return flat.as_strided(self.shape, self.strides).contiguous()

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes in the file, each chunk in the memory of the one before."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.num_bytes)))
        for first in range(0, self.num_bytes, CHUNK_BYTES):
            chunk = buffer[: self.num_bytes - first]
            self.file.read_into(self.offset + first, chunk)
            yield chunk

    def _dequantised(self) -> Tensor:
        kind = self.kind
        if kind.dequantise is None:
            raise TypeError(kind.name)
        num_blocks = self.count // kind.block
        out = np.empty((num_blocks, kind.block), np.float32)
        step = CHUNK_BYTES // kind.num_bytes
        for first in range(0, num_blocks, step):
            rows = min(step, num_blocks - first)
            raw = self.file.read(self.offset + first * kind.num_bytes, rows * kind.num_bytes)
            out[first : first + rows] = kind.dequantise(np.frombuffer(raw, np.uint8).reshape(rows, kind.num_bytes))
        return torch.from_numpy(out).reshape(self.shape)


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def shown_shape(shape: object) -> str:
    """A shape for a message, however long it is."""
    return str(list(shape[:MAX_DIMENSIONS]) if isinstance(shape, tuple | list) else type(shape).__name__)[:200]


def shown_name(name: str) -> str:
    """A tensor's name for a message of one line."""
    return name if name.isprintable() and len(name) <= 120 else repr(name[:120])
