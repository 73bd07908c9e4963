"""The check of charges against a GPU's counter, on a counter that a test makes."""

from __future__ import annotations

import json
import threading
import time

import pytest

from benchmarks.energy_gpu import main
from nsm_core.tokenizer import Tokenizer
from tests.support.fake_meters import FakeClock, FakeNvml
from tests.support.models import RandomModel, as_loaded

SHORT = ["--device=cpu", "--executor=eager", "--slots=4", "--token-budget=64", "--max-prompt=40"]
LOAD = ["--max-tokens=5", "--phases=2"]
# Phases this short hold one or two looks at the meter: the sums differ by tens of percent on a busy machine.
TIMES = ["--seconds=0.6", "--pause=0.1", "--warm-up=0.05", "--tolerance=0.5"]


class RealClock(FakeClock):
    """The one that the engine is timed by."""

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.monotonic()

    @now.setter
    def now(self, value: float) -> None:
        """It moves by itself."""


class LyingNvml(FakeNvml):
    """A device that tells the check ten times what it tells the meter."""

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        is_meter = threading.current_thread().name == "nsm-nvml"
        return super().nvmlDeviceGetTotalEnergyConsumption(handle) * (1 if is_meter else 10)


def run(tokenizer: Tokenizer, nvml: FakeNvml) -> int:
    return main([*SHORT, *LOAD, *TIMES], loaded=as_loaded(RandomModel(), tokenizer), nvml=nvml, uuid="GPU-1")


def test_M6_charges_add_up_to_the_counter(tiny_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(tiny_tokenizer, FakeNvml(RealClock(), period_s=0.002))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0
    assert result["is_good"]
    assert len(result["phases"]) == 2
    assert all(phase["charged"] > 0 and phase["num_requests"] > 4 for phase in result["phases"])
    assert abs(result["off"]) <= 0.5


def test_a_meter_that_is_off_fails(tiny_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny_tokenizer, LyingNvml(RealClock(), period_s=0.002)) == 1
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["is_good"]
