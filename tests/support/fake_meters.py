"""Meters whose joules a test decides."""

from __future__ import annotations

from nsm_core.stats import EnergyUse, Method, Source


class FakeMeter:
    """Shows what `joules` says; `num_reads` counts the readings."""

    def __init__(self, source: Source = "gpu", method: Method = "nvml") -> None:
        self.joules = 0.0
        self.num_reads = 0
        self.is_closed = False
        self._source, self._method = source, method

    def read(self) -> tuple[EnergyUse, ...]:
        self.num_reads += 1
        return (EnergyUse(source=self._source, method=self._method, joules=self.joules),)

    def close(self) -> None:
        self.is_closed = True


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeNvml:
    """What NvmlMeter uses of pynvml: GPUs whose counter of millijoules moves every `period_s`, or with power only.

    `uuids`: of the GPUs there are. `watts`: what each draws. `num_asked`: for energy or power.
    """

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801  (as the library names it)
        pass

    def __init__(
        self, clock: FakeClock, *, uuids: tuple[str, ...] = ("GPU-1",), watts: float = 400.0, period_s: float = 0.1,
        has_counter: bool = True,
    ) -> None:  # fmt: skip
        self.watts = watts
        self.is_open = False
        self.num_asked = 0
        self._clock, self._uuids, self._period_s, self._has_counter = clock, uuids, period_s, has_counter

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self._uuids:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.num_asked += 1
        if not self._has_counter:
            raise self.NVMLError_NotSupported
        return round(5_000_000 + self.true_joules() * 1e3)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.num_asked += 1
        return round(self.watts * 1e3)

    def true_joules(self) -> float:
        """As far as the counter has moved."""
        return self.watts * (self._clock.now // self._period_s) * self._period_s
