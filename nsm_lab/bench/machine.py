"""The machine of a benchmark (processor, memory, load), and a process's use of it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsm_core.errors import ConfigError

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MIB = 2**20


def machine() -> dict[str, Any]:
    """The facts that speed depends on. `load`: load average of the minute before the benchmark."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": _memory_mb(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": load,
    }


def cpu_name() -> str:
    """Of the processor; Linux leaves `platform.processor()` empty."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_mb() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines() if path.exists() else []


class ProcessUse:
    """CPU seconds and memory of a process and its children; None: of this process alone."""

    def __init__(self, pid: int | None = None) -> None:
        """Raises ConfigError for a process that cannot be looked at."""
        self._pid = pid
        if not Path(f"/proc/{pid or os.getpid()}/stat").exists():
            raise ConfigError(f"there is no process {pid} that could be looked at")

    def cpu_s(self) -> float:
        """Seconds so far."""
        if self._pid is None:
            return time.process_time()
        return sum(map(_ticks, _tree(self._pid))) / TICKS_PER_S

    def rss_mb(self) -> float:
        """Memory now, in MiB; pages that processes share count in each."""
        return sum(map(_rss_kb, [os.getpid()] if self._pid is None else _tree(self._pid))) / 1024


def _tree(pid: int) -> Iterator[int]:
    yield pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in _lines(children)[:1]:
        for number in child.split():
            yield from _tree(int(number))


def _ticks(pid: int) -> int:
    """User and system time of all threads; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _rss_kb(pid: int) -> int:
    try:
        lines = _lines(Path(f"/proc/{pid}/status"))
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
