"""Memory that was freed and that the process still has: glibc gives less of it back than it could."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # of malloc.h


def trim_heap() -> None:
    """Gives it back to the system where the C library can (glibc). Takes milliseconds; any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_arenas(number: int) -> None:
    """Threads that allocate for the first time from now on share `number` arenas, where the C library has such (glibc).

    It would give each a heap of its own, up to eight a core. What one frees the others cannot use, and states of
    megabytes pass through many threads.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_ARENA_MAX, number)
