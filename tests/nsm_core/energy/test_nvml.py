from __future__ import annotations

from typing import Any

import pytest

from nsm_core.energy.nvml import NvmlMeter
from nsm_core.energy.steady import MAX_GAP_S, SteadyCounter
from nsm_core.errors import ConfigError
from tests.fake_meters import FakeClock, FakeNvml


def meter(clock: FakeClock, nvml: Any, *uuids: str) -> NvmlMeter:
    return NvmlMeter(uuids or ("GPU-1",), library=nvml, clock=clock)


def shown(meter: NvmlMeter) -> dict[str, float]:
    return {use.method: use.joules for use in meter.read()}


def test_M6_between_two_moves_of_the_counter_it_rises_steadily() -> None:
    clock = FakeClock()
    metered = meter(clock, FakeNvml(clock, watts=400.0, period_s=0.1))
    off = []
    for step in range(1, 2001):
        clock.now = step * 0.003
        off.append(abs(shown(metered)["nvml"] - 400.0 * clock.now))
    assert max(off[100:]) < 400.0 * 0.003 * 2  # of our own intervals; the counter stands still for 33 of them


def test_it_never_falls_and_ends_where_the_counter_does() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock, watts=700.0)
    metered = meter(clock, nvml)
    last = 0.0
    for step in range(1, 1000):
        clock.now += 0.007
        nvml.watts = 700.0 if step < 500 else 0.0
        last, before = shown(metered)["nvml"], last
        assert last >= before


def test_a_counter_that_stands_still_is_believed() -> None:
    counter = SteadyCounter(100.0, 0.0)
    counter.advance(110.0, 0.1)
    assert counter.advance(110.0, 0.15) == pytest.approx(15.0)
    still = counter.advance(110.0, 0.1 + MAX_GAP_S + 0.01)
    assert still == counter.advance(110.0, 50.0)
    assert counter.advance(120.0, 60.0) == pytest.approx(20.0)


def test_gpus_without_a_counter_are_summed_up_from_their_power() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock, watts=100.0, has_counter=False)
    metered = meter(clock, nvml)
    clock.now = 2.0
    assert shown(metered) == {"nvml_power": 200.0}
    nvml.watts, clock.now = 300.0, 3.0
    assert shown(metered) == {"nvml_power": 400.0}  # 200 W in the mean


def test_several_gpus_are_one_source() -> None:
    clock = FakeClock()
    metered = meter(clock, FakeNvml(clock, uuids=("GPU-1", "GPU-2"), period_s=0.5), "1", "GPU-2")
    clock.now = 0.5
    assert shown(metered) == {"nvml": 400.0}


def test_what_nvml_does_not_know_is_refused() -> None:
    clock = FakeClock()
    with pytest.raises(ConfigError, match="NVML tells no energy: not found"):
        meter(clock, FakeNvml(clock), "GPU-9")


def test_closing_shuts_nvml_down_once() -> None:
    clock = FakeClock()
    nvml = FakeNvml(clock)
    metered = meter(clock, nvml)
    metered.close()
    assert not nvml.is_open
    nvml.is_open = True
    metered.close()
    assert nvml.is_open
