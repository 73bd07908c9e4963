"""Memory of a server: what it gives back to the system, and how often Python looks for garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

SMAPS = Path("/proc/self/smaps")  # Linux: each mapping, and how much of it is in memory
# A private one that cannot be written to
MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) r-.p \S+ \S+ (?P<inode>\d+) ")
MIN_CODE_BYTES = 256 * 1024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
HELD_BYTES = 32 * 1024 * 1024  # of freed memory at the end of a heap: a turn has up to five copies of a state at once
LARGEST_BYTES = 16 * 1024 * 1024  # larger blocks come from the system and go back
# Objects, more than those that went, after which Python looks through the young ones. Python's own 700 come with every
# few requests, and nearly all of them go without it.
YOUNG_OBJECTS = 10_000


def trim_heap() -> None:
    """Gives it back to the system where the C library can (glibc). Takes milliseconds; any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_code() -> None:
    """Releases the pages of programs and libraries that are in memory (Linux): most of them only a start needs.

    They stay in the system's cache of files, and what runs again comes back from there, some kilobytes at a time. Takes
    ten milliseconds; any thread.
    """
    library = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        for start, stop in _code(SMAPS.read_text("utf-8", "replace")):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _code(smaps: str) -> Iterator[tuple[int, int]]:
    """The mappings of files that nothing can write to and nothing has written to: a page that was is a copy of its own,
    which the file does not have.
    """
    for mapping in re.split(r"^(?=[0-9a-f])", smaps, flags=re.MULTILINE)[1:]:
        found = MAPPING.match(mapping)
        if found is None or found["inode"] == "0":
            continue
        sizes = dict(re.findall(r"^(Rss|Anonymous): +(\d+) kB", mapping, re.MULTILINE))
        if sizes.get("Anonymous") == "0" and int(sizes["Rss"]) * 1024 >= MIN_CODE_BYTES:
            yield int(found["start"], 16), int(found["stop"], 16)


def limit_arenas(number: int) -> None:
    """Threads that allocate for the first time from now on share `number` arenas, where the C library has such (glibc).

    It would give each a heap of its own, up to eight a core. What one frees the others cannot use, and states of
    megabytes pass through many threads.
    """
    _set_heap_option(M_ARENA_MAX, number)


def keep_freed_memory() -> None:
    """What is freed stays with the process until `trim_heap`, where the C library can (glibc).

    Otherwise each state of a few megabytes comes from the system anew, page by page when it is first written: 3 ms and
    more for 3.8 MB on a virtual machine, several times a turn.
    """
    _set_heap_option(M_TRIM_THRESHOLD, HELD_BYTES)
    _set_heap_option(M_MMAP_THRESHOLD, LARGEST_BYTES)


def _set_heap_option(option: int, value: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(option, value)


def freeze_objects() -> None:
    """The server has started: what lives now lives to its end, and the collector never looks at it again.

    A full collection would go through all modules and models, 0.1 s in which nothing else runs. Not even one is worth
    it here: of 335,000 objects 1,452 were garbage.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()


def pause_collection() -> None:
    """Until `freeze_objects`: while a server starts, nearly everything that it makes stays."""
    gc.disable()
