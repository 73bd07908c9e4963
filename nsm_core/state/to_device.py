"""Copies of host data to a device, in the order of launches: a GPU is not waited for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HALF_BYTES = 1 << 20  # of a thread's pinned memory; larger data takes memory of its own
ALIGNMENT = 16


class PinnedRing:
    """Pinned memory that one thread fills again and again, for copies on one stream.

    Memory for each copy would make the driver tell each time which copies have ended: half of a copy's cost.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._pinned = torch.empty(2 * HALF_BYTES, dtype=torch.uint8, pin_memory=True)
        self._bytes = self._pinned.numpy()
        self._left: list[torch.cuda.Event | None] = [None, None]  # when the stream was done with each half
        self._half = self._at = 0

    def filled(self, values: npt.NDArray[Any]) -> Tensor:
        """The bytes of `values`, at most HALF_BYTES of them, in pinned memory: to be copied before the next call."""
        num_bytes = values.nbytes
        if self._at + num_bytes > HALF_BYTES:
            self._turn()
        start = self._half * HALF_BYTES + self._at
        self._at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._bytes[start : start + num_bytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self._pinned[start : start + num_bytes]

    def _turn(self) -> None:
        left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        left.record(self.stream)
        self._left[self._half] = left
        self._half, self._at = 1 - self._half, 0
        entered = self._left[self._half]
        if entered is not None:
            entered.synchronize()  # long past: a half takes many steps


_rings = threading.local()


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device."""
    if device.type != "cuda":
        return torch.from_numpy(values).to(device)
    if not 0 < values.nbytes <= HALF_BYTES:
        return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
    there = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=device)
    copy_to_device(values, there)
    return there


def copy_to_device(values: npt.NDArray[Any], to: Tensor) -> None:
    """`values` become the content of `to`, contiguous, of the same number of bytes.

    Raises ValueError for more than HALF_BYTES, which would be written over what another copy has not read.
    """
    if values.nbytes > HALF_BYTES:
        raise ValueError(f"{values.nbytes} bytes are more than the {HALF_BYTES} of a copy")
    if not to.is_cuda:
        to.copy_(torch.from_numpy(values).view(to.shape))
        return
    stream = torch.cuda.current_stream(to.device)
    ring: PinnedRing | None = getattr(_rings, "ring", None)
    if ring is None or ring.stream != stream:
        ring = _rings.ring = PinnedRing(stream)
    to.copy_(ring.filled(values).view(to.dtype).view(to.shape), non_blocking=True)
