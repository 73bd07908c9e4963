"""Memory for states: the system commits pages at their first write, and has them back when no state uses them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

# Smaller tensors share pages with others.
LEAST_BYTES = 1 << 20
HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64


class Pages:
    """Zeros [shape] on the CPU. A row that no request has used yet takes no memory.

    Row 1 begins with a huge page, if the executor wants those. So a single session, which has row 0, does not wait for
    a huge page of each tensor, 30 MB for a state of 3.8 MB: that took 45 to 60 ms on a virtual machine.

    Raises MemoryError when there is not even room for the addresses.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        self._map = _map(num_bytes + HUGE_PAGE_BYTES) if num_bytes >= LEAST_BYTES else None
        if self._map is None:
            flat = torch.zeros(count, dtype=dtype)
        else:
            raw = torch.frombuffer(self._map, dtype=torch.uint8)
            start = -(raw.data_ptr() + num_bytes // shape[0]) % HUGE_PAGE_BYTES
            start -= start % CACHE_LINE_BYTES
            flat = raw[start : start + num_bytes].view(dtype)
        self.tensor: Tensor = flat.view(shape)

    def give_back(self) -> None:
        """All numbers are zero again, and the system has the memory."""
        if self._map is None:
            self.tensor.zero_()
        else:
            self._map.madvise(mmap.MADV_DONTNEED)


def _map(num_bytes: int) -> mmap.mmap | None:
    """None: not on this system."""
    if not hasattr(mmap, "MAP_PRIVATE") or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(str(error)) from error
