from __future__ import annotations

import logging

import pytest

from nsm_core.energy import factory
from nsm_core.energy.estimate import EstimateMeter
from nsm_core.energy.factory import make_meter
from nsm_core.errors import ConfigError
from tests.support.fake_meters import FakeMeter


def refuse(*args: object, **given: object) -> FakeMeter:
    raise ConfigError("not here")


def test_the_estimate_is_time_on_a_cpu_times_power() -> None:
    times = iter([3.0, 3.5, 5.0])
    meter = EstimateMeter(8.0, cpu_time=lambda: next(times))
    (use,) = meter.read()
    assert (use.source, use.method, use.joules) == ("cpu", "estimate", 4.0)
    assert meter.read()[0].joules == 16.0


def test_where_nothing_measures_the_cpu_it_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "RaplMeter", refuse)
    assert [(use.source, use.method) for use in make_meter().read()] == [("cpu", "estimate")]


def test_a_gpu_and_the_cpus_are_measured_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = FakeMeter(), FakeMeter("cpu", "rapl")
    monkeypatch.setattr(factory, "NvmlMeter", lambda uuids: gpu)
    shares: list[float] = []

    def share_cpu(*, share: float) -> FakeMeter:
        shares.append(share)
        return cpu

    monkeypatch.setattr(factory, "RaplMeter", share_cpu)
    meter = make_meter(gpu_uuids=["GPU-1"], num_engines=2)
    assert shares == [0.5]
    assert [(use.source, use.method) for use in meter.read()] == [("gpu", "nvml"), ("cpu", "rapl")]
    meter.close()
    assert gpu.is_closed
    assert cpu.is_closed


def test_a_gpu_that_tells_nothing_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(factory, "NvmlMeter", refuse)
    with caplog.at_level(logging.WARNING, "nsm.energy"):
        meter = make_meter(gpu_uuids=["GPU-1"])
    assert all(use.source != "gpu" for use in meter.read())
    assert "the energy of the GPU is not counted: not here" in caplog.text
