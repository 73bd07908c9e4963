"""Energy of NVIDIA GPUs, by the driver's own library."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nsm_core.energy.steady import SteadyCounter
from nsm_core.errors import ConfigError
from nsm_core.stats import EnergyUse, Method

logger = logging.getLogger("nsm.energy")

# Asking a driver takes three milliseconds on an H200: a step of the model in which nobody may wait for it.
SAMPLE_EVERY_S = 0.2


class NvmlMeter:
    """The sum over some GPUs of this host. A counter is of the whole device, whoever uses it.

    From Volta on the driver counts millijoules itself; older GPUs report their power only, which is summed up here. A
    thread of its own looks at them; `read` asks nobody. Any thread may call it.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        library: Any = None,
        clock: Callable[[], float] = time.monotonic,
        sample_every_s: float | None = SAMPLE_EVERY_S,
    ) -> None:
        """`uuids`: as NVML and torch name devices, with or without `GPU-`. `library`: pynvml, or a stand-in.
        `sample_every_s`: None where the caller calls `sample`.

        Raises ConfigError where there is no NVML, no such device, or it tells neither energy nor power.
        """
        self._nvml = library or _pynvml()
        self._clock = clock
        try:
            self._nvml.nvmlInit()
            self._devices = [_open(self._nvml, uuid, clock()) for uuid in uuids]
        except self._nvml.NVMLError as error:
            raise ConfigError(f"NVML reports no energy: {error}") from error
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if sample_every_s is not None:
            self._thread = threading.Thread(target=self._watch, args=(sample_every_s,), name="nsm-nvml", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Asks the driver: milliseconds."""
        for device in self._devices:
            value = device.ask()
            with self._lock:
                device.show(value, self._clock())

    def read(self) -> tuple[EnergyUse, ...]:
        now = self._clock()
        uses: dict[Method, float] = {}
        with self._lock:
            for device in self._devices:
                uses[device.method] = uses.get(device.method, 0.0) + device.read(now)
        return tuple(EnergyUse(source="gpu", method=method, joules=joules) for method, joules in uses.items())

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._nvml.nvmlShutdown()

    def _watch(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            try:
                self.sample()
            except self._nvml.NVMLError as error:
                logger.error("the energy of the GPU is not counted any more: %s", error)
                return


class _EnergyCounter:
    method: Method = "nvml"

    def __init__(self, nvml: Any, handle: Any, now: float) -> None:
        self._nvml, self._handle = nvml, handle
        self._counter = SteadyCounter(self.ask(), now)

    def ask(self) -> float:
        """Joules since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3  # it tells millijoules

    def show(self, joules: float, now: float) -> None:
        self._counter.show(joules, now)

    def read(self, now: float) -> float:
        return self._counter.read(now)


class _PowerIntegral:
    """By the mean of the powers at both ends of each interval; since the last look, by the power then."""

    method: Method = "nvml_power"

    def __init__(self, nvml: Any, handle: Any, now: float) -> None:
        self._nvml, self._handle = nvml, handle
        self._now, self._watts = now, self.ask()
        self._joules = self._reported = 0.0

    def ask(self) -> float:
        """Watts."""
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3  # it tells milliwatts

    def show(self, watts: float, now: float) -> None:
        self._joules += (now - self._now) * (watts + self._watts) / 2
        self._now, self._watts = now, watts

    def read(self, now: float) -> float:
        self._reported = max(self._reported, self._joules + (now - self._now) * self._watts)
        return self._reported


def _open(nvml: Any, uuid: str, now: float) -> _EnergyCounter | _PowerIntegral:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    try:
        return _EnergyCounter(nvml, handle, now)
    except nvml.NVMLError_NotSupported:
        return _PowerIntegral(nvml, handle, now)


def _pynvml() -> Any:
    try:
        import pynvml  # of the package nvidia-ml-py
    except ModuleNotFoundError as error:
        raise ConfigError("the energy of a GPU needs the package nvidia-ml-py") from error
    return pynvml
