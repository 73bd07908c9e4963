"""Energy of NVIDIA GPUs, by the driver's own library."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from nsm_core.energy.steady import SteadyCounter
from nsm_core.errors import ConfigError
from nsm_core.stats import EnergyUse


class NvmlMeter:
    """The sum over some GPUs of this host. A counter is of the whole device, whoever uses it.

    From Volta on the driver counts millijoules itself; older GPUs tell their power only, which is summed up here.
    """

    def __init__(
        self, uuids: Sequence[str], *, library: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`uuids`: as NVML and torch name devices, with or without `GPU-`. `library`: pynvml, or a stand-in.

        Raises ConfigError where there is no NVML, no such device, or it tells neither energy nor power.
        """
        self._nvml = library or _pynvml()
        self._clock = clock
        try:
            self._nvml.nvmlInit()
            self._devices = [self._open(uuid) for uuid in uuids]
        except self._nvml.NVMLError as error:
            raise ConfigError(f"NVML tells no energy: {error}") from error
        self._is_open = True

    def read(self) -> tuple[EnergyUse, ...]:
        now = self._clock()
        uses: dict[Any, float] = {}
        for device in self._devices:
            method = "nvml" if isinstance(device, _EnergyCounter) else "nvml_power"
            uses[method] = uses.get(method, 0.0) + device.read(now)
        return tuple(EnergyUse(source="gpu", method=method, joules=joules) for method, joules in uses.items())

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._nvml.nvmlShutdown()

    def _open(self, uuid: str) -> _EnergyCounter | _PowerIntegral:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        try:
            return _EnergyCounter(self._nvml, handle, self._clock())
        except self._nvml.NVMLError_NotSupported:
            return _PowerIntegral(self._nvml, handle, self._clock())


class _EnergyCounter:
    def __init__(self, nvml: Any, handle: Any, now: float) -> None:
        self._nvml, self._handle = nvml, handle
        self._counter = SteadyCounter(self._joules(), now)

    def read(self, now: float) -> float:
        return self._counter.advance(self._joules(), now)

    def _joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3  # it tells millijoules


class _PowerIntegral:
    """By the mean of the powers at both ends of each interval."""

    def __init__(self, nvml: Any, handle: Any, now: float) -> None:
        self._nvml, self._handle = nvml, handle
        self._now, self._watts = now, self._power()
        self._joules = 0.0

    def read(self, now: float) -> float:
        watts = self._power()
        self._joules += (now - self._now) * (watts + self._watts) / 2
        self._now, self._watts = now, watts
        return self._joules

    def _power(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3  # it tells milliwatts


def _pynvml() -> Any:
    try:
        import pynvml  # of the package nvidia-ml-py
    except ModuleNotFoundError as error:
        raise ConfigError("the energy of a GPU needs the package nvidia-ml-py") from error
    return pynvml
