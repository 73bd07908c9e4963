from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from nsm_core.energy.nvml import NvmlMeter
from nsm_core.energy.steady import MAX_GAP_S, SteadyCounter
from nsm_core.errors import ConfigError
from tests.support.fake_meters import FakeClock, FakeNvml


def meter(clock: FakeClock, nvml: Any, *uuids: str) -> NvmlMeter:
    return NvmlMeter(uuids or ("GPU-1",), library=nvml, clock=clock, sample_every_s=None)


def shown(meter: NvmlMeter) -> dict[str, float]:
    return {use.method: use.joules for use in meter.read()}


def test_M6_between_two_looks_at_a_counter_that_jumps_it_rises_steadily() -> None:
    clock = FakeClock()
    metered = meter(clock, FakeNvml(clock, watts=400.0, period_s=0.1))
    off = []
    for step in range(1, 2001):
        clock.now = step * 0.003
        if step % 67 == 0:
            metered.sample()
        off.append(shown(metered)["nvml"] - 400.0 * clock.now)
    assert max(map(abs, off[200:])) < 400.0 * 0.1  # no more than the counter itself is behind


def test_it_never_falls_and_ends_where_the_counter_does() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock, watts=700.0)
    metered = meter(clock, nvml)
    last = 0.0
    for step in range(1, 1000):
        clock.now += 0.007
        if step % 29 == 0:
            nvml.watts = 700.0 if step < 500 else 690.0
            metered.sample()
        last, before = shown(metered)["nvml"], last
        assert last >= before


def test_reading_asks_nobody() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock)
    metered = meter(clock, nvml)
    num_asked = nvml.num_asked
    for _ in range(100):
        metered.read()
    assert nvml.num_asked == num_asked


def test_a_counter_that_stands_still_is_believed() -> None:
    counter = SteadyCounter(100.0, 0.0)
    counter.show(110.0, 0.1)
    assert counter.read(0.15) == pytest.approx(15.0)
    counter.show(110.0, 0.2)
    still = counter.read(0.1 + MAX_GAP_S + 0.01)
    assert still == counter.read(50.0)
    counter.show(120.0, 60.0)
    assert counter.read(60.0) == pytest.approx(20.0)


def test_gpus_without_a_counter_are_summed_up_from_their_power() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock, watts=100.0, has_counter=False)
    metered = meter(clock, nvml)
    clock.now = 2.0
    assert shown(metered) == {"nvml_power": 200.0}  # as long as nobody has looked
    metered.sample()
    nvml.watts, clock.now = 300.0, 3.0
    metered.sample()
    assert shown(metered) == {"nvml_power": 400.0}  # 200 W in the mean


def test_several_gpus_are_one_source() -> None:
    clock = FakeClock()
    metered = meter(clock, FakeNvml(clock, uuids=("GPU-1", "GPU-2"), period_s=0.5), "1", "GPU-2")
    clock.now = 0.5
    metered.sample()
    assert shown(metered) == {"nvml": 400.0}


def test_what_nvml_does_not_know_is_refused() -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="NVML reports no energy: not found"):
        meter(clock, FakeNvml(clock), "GPU-9")


class WatchedNvml(FakeNvml):
    """Tells when it was asked for the third time, and from the fifth on fails if it shall."""

    def __init__(self, clock: FakeClock, *, fails: bool = False) -> None:
        super().__init__(clock)
        self.was_asked, self.has_failed = threading.Event(), threading.Event()
        self._fails = fails

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        joules = super().nvmlDeviceGetTotalEnergyConsumption(handle)
        if self.num_asked == 3:
            self.was_asked.set()
        if self._fails and self.num_asked == 5:
            self.has_failed.set()
            raise self.NVMLError("the GPU is lost")
        return joules


def test_a_thread_looks_until_the_meter_is_closed() -> None:
    nvml = WatchedNvml(FakeClock())
    metered = NvmlMeter(["GPU-1"], library=nvml, clock=FakeClock(), sample_every_s=0.001)
    assert nvml.was_asked.wait(60)
    metered.close()
    assert not nvml.is_open
    num_asked, nvml.is_open = nvml.num_asked, True
    metered.close()  # once is enough
    assert nvml.is_open
    assert nvml.num_asked == num_asked


def test_a_gpu_that_is_lost_is_told_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    nvml = WatchedNvml(FakeClock(), fails=True)
    with caplog.at_level(logging.ERROR, "nsm.energy"):
        metered = NvmlMeter(["GPU-1"], library=nvml, clock=FakeClock(), sample_every_s=0.001)
        assert nvml.has_failed.wait(60)
        metered.close()
    assert caplog.messages == ["the energy of the GPU is not counted any more: the GPU is lost"]
    assert metered.read()[0].joules == 0.0
