"""The limits of this process's control group, in both versions of Linux's interface: what a container may use of the
machine. Elsewhere there are none.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 2**60  # version 1 says 2^63, rounded to pages, for no limit
NEARLY_FULL = 0.95
SAMPLE_S = 0.25


def max_threads() -> int | None:
    """As many threads as may run at once; None: as many as the machine has processors."""
    limits = [quota / period for quota, period in _quotas() if quota > 0]
    return max(1, math.ceil(min(limits))) if limits else None


def usable_threads(num_threads: int) -> int:
    """`num_threads`, or as many of them as the group's share of the processors feeds."""
    return min(num_threads, max_threads() or num_threads)


def max_memory_bytes() -> int | None:
    return min((limit for limit, _ in _memory_limits()), default=None)


def num_killed() -> int:
    """Processes of this group that the kernel ended because the group had no memory left."""
    counts = [
        int(line.split()[1])
        for folder in (*_folders("memory")[:1], *_folders("")[:1])
        for name in ("memory.oom_control", "memory.events")
        for line in _read(folder / name).splitlines()
        if line.startswith("oom_kill ")
    ]
    return max(counts, default=0)


class MemoryWatch:
    """Whether little is left of the memory that the group may use. Caches that the kernel would drop do not count."""

    def __init__(self) -> None:
        self._limits = list(_memory_limits())
        self._sampled_at = -math.inf
        self._is_low = False

    def is_low(self) -> bool:
        """As of at most `SAMPLE_S` ago: asking costs reading two files."""
        now = time.monotonic()
        if self._limits and now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            self._is_low = any(used_bytes(folder) > NEARLY_FULL * limit for limit, folder in self._limits)
        return self._is_low


def used_bytes(folder: Path) -> int:
    """By the group of this folder, without caches that the kernel would drop."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    droppable = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return used - int(droppable)


def _memory_limits() -> Iterator[tuple[int, Path]]:
    """Bytes, with the folder of the group that has them: the process's own, and those above it."""
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(controller):
            limit = _number(folder / name)
            if limit is not None and limit < NO_LIMIT_BYTES:
                yield limit, folder


def _quotas() -> Iterator[tuple[int, int]]:
    """Microseconds of processor time in each period of so many microseconds; -1 for no limit."""
    for folder in _folders(""):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal():
            yield int(quota), int(period)
    for folder in _folders("cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us:
            yield quota_us, period_us


def _folders(controller: str) -> list[Path]:
    """The group's folder and those above it, in the tree of a controller of version 1, or "" of version 2.

    A container may see its own group as the root, while its path is still that of the machine: then only the root is
    there.
    """
    found = []
    for line in _read(PROC).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        for root in (ROOT / controllers, ROOT / controller) if controllers else (ROOT, ROOT / "unified"):
            own = root / path.lstrip("/")
            above = [own, *own.parents]
            found += [folder for folder in above if folder.is_relative_to(root) and folder.is_dir()]
    return list(dict.fromkeys(found))


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_read(path))
    return None


def _read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
