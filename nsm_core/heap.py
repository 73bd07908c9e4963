"""Memory that was freed and that the process still has."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Gives it back to the system where the C library can (glibc). Takes milliseconds; any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
