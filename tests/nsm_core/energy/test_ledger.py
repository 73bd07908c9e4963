from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nsm_core.energy.ledger import READ_EVERY_S, EnergyLedger
from nsm_core.energy.meter import CombinedMeter
from tests.support.fake_meters import FakeMeter


def joules(uses: tuple[object, ...]) -> float:
    return math.fsum(use.joules for use in uses)  # type: ignore[attr-defined]


def test_M6_a_step_is_charged_by_the_tokens_that_each_request_had_in_it() -> None:
    meter = FakeMeter()
    ledger = EnergyLedger(meter)
    ledger.begin()
    meter.joules = 12.0
    ledger.work({"prompt": 5, "decode": 1}, 0.01, now=0.01)
    assert joules(ledger.close_account("prompt")) == 10.0
    assert joules(ledger.close_account("decode")) == 2.0


def test_a_slow_step_costs_more_than_a_fast_one() -> None:
    meter = FakeMeter()
    ledger = EnergyLedger(meter)
    ledger.begin()
    ledger.work({"a": 1}, 0.03, now=0.03)
    ledger.work({"b": 9}, 0.01, now=0.04)
    meter.joules = 4.0
    assert joules(ledger.close_account("a")) == 3.0
    assert joules(ledger.close_account("b")) == 1.0


def test_idle_times_are_nobodys() -> None:
    meter = FakeMeter()
    ledger = EnergyLedger(meter)
    meter.joules = 100.0  # before the first request
    ledger.begin()
    meter.joules = 101.0
    ledger.work({"a": 1}, 0.01, now=0.01)
    ledger.rest()
    meter.joules = 500.0  # after it
    ledger.begin()
    meter.joules = 502.0
    ledger.work({"b": 1}, 0.01, now=5.0)
    assert joules(ledger.close_account("a")) == 1.0
    assert joules(ledger.close_account("b")) == 2.0
    assert joules(ledger.charged) == 3.0
    assert joules(ledger.total) == 502.0


def test_a_request_that_never_was_at_work_costs_nothing() -> None:
    assert EnergyLedger(FakeMeter()).close_account("nobody") == ()


def test_sources_are_charged_apart() -> None:
    gpu, cpu = FakeMeter(), FakeMeter("cpu", "rapl")
    ledger = EnergyLedger(CombinedMeter([gpu, cpu]))
    ledger.begin()
    gpu.joules, cpu.joules = 8.0, 2.0
    ledger.work({"a": 1, "b": 3}, 0.01, now=0.01)
    charged = {(use.source, use.method): use.joules for use in ledger.close_account("b")}
    assert charged == {("gpu", "nvml"): 6.0, ("cpu", "rapl"): 1.5}


def test_readings_are_rare() -> None:
    meter = FakeMeter()
    ledger = EnergyLedger(meter)
    ledger.begin()
    num_before, now = meter.num_reads, 0.0
    for _ in range(1000):
        now += 0.001
        ledger.work({"a": 1}, 0.001, now=now)
    assert meter.num_reads - num_before <= 1.0 / READ_EVERY_S + 1


steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 64), min_size=1),  # tokens of each request
        st.floats(1e-4, 0.2),  # seconds
        st.floats(0.0, 50.0),  # joules of the step
        st.floats(0.0, 50.0),  # joules of the idle time after it
        st.booleans(),  # whether there is one
        st.sampled_from(["", *"abcdef"]),  # the request that ends
    ),
    max_size=40,
)


@given(steps)
def test_M6_charges_add_up_to_the_meter_but_for_idle_times(steps: list[tuple[object, ...]]) -> None:
    meter = FakeMeter()
    ledger = EnergyLedger(meter)
    now = idle = closed = 0.0
    for tokens, seconds, used, used_idle, is_idle, ended in steps:
        ledger.begin()
        meter.joules += used  # type: ignore[operator]
        now += seconds  # type: ignore[operator]
        ledger.work(tokens, seconds, now=now)  # type: ignore[arg-type]
        closed += joules(ledger.close_account(ended))  # type: ignore[arg-type]
        if is_idle:
            ledger.rest()
            meter.joules += used_idle  # type: ignore[operator]
            idle += used_idle  # type: ignore[operator]
            ledger.begin()
    ledger.rest()
    closed += sum(joules(ledger.close_account(request_id)) for request_id in "abcdef")
    assert math.isclose(closed, meter.joules - idle, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(joules(ledger.charged), closed, rel_tol=1e-9, abs_tol=1e-6)
