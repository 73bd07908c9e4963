"""What the servers use while they are under load: memory, file descriptors, connections, once a second."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Sequence

import psutil

from loadtests.errors import RunError

INTERVAL_S = 0.5
IDLE_WAIT_S = 1.0  # for the last connections to be closed
MIN_READINGS = 8  # for a growth
MB = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Of one process. `at_s`: Unix time."""

    at_s: float
    rss_mb: float
    fds: int
    connections: int
    threads: int


@dataclasses.dataclass(slots=True)
class ResourceUse:
    """One server over a run."""

    name: str
    readings: list[Reading] = dataclasses.field(default_factory=list)

    @property
    def max_rss_mb(self) -> float | None:
        return max((reading.rss_mb for reading in self.readings), default=None)

    @property
    def rss_rise_mb(self) -> float | None:
        """The largest RSS over the first."""
        return None if self.max_rss_mb is None else self.max_rss_mb - self.readings[0].rss_mb

    def left(self, field: str) -> float | None:
        """What the last reading, when the load was gone, has more than the first, before it came."""
        return getattr(self.readings[-1], field) - getattr(self.readings[0], field) if self.readings else None

    def growth(self, field: str) -> float | None:
        """Median of the last quarter of the readings less that of the second, below which things warm up."""
        if len(self.readings) < MIN_READINGS:
            return None
        quarter = len(self.readings) // 4
        values = [getattr(reading, field) for reading in self.readings]
        return float(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))


class ResourceWatch:
    """`with` it: a thread reads what the processes use. `processes`: (name, process id) of each.

    Raises RunError for a process that is not there.
    """

    def __init__(self, processes: Sequence[tuple[str, int]], interval_s: float = INTERVAL_S) -> None:
        self.use = [ResourceUse(name) for name, _ in processes]
        self._processes = [_process(pid) for _, pid in processes]
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ResourceWatch:
        self._read_all()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(IDLE_WAIT_S)
        self._stop.set()
        self._thread.join()
        self._read_all()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._read_all()

    def _read_all(self) -> None:
        for process, use in zip(self._processes, self.use, strict=True):
            try:
                use.readings.append(read(process))
            except psutil.NoSuchProcess:
                continue  # that it ended is seen elsewhere


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError) as error:
        raise RunError(f"--pid {pid}: there is no such process") from error


def read(process: psutil.Process) -> Reading:
    """Raises psutil.NoSuchProcess."""
    with process.oneshot():
        return Reading(
            at_s=time.time(),
            rss_mb=process.memory_info().rss / MB,
            fds=process.num_fds(),
            connections=len(process.net_connections("tcp")),
            threads=process.num_threads(),
        )
