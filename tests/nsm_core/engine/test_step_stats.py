"""What an engine tells of its requests' times and energy, and of its model."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest, Timings, joules_of
from nsm_core.model.observer import ModelObserver
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_request, random_ids, run_all, small_model
from tests.support.fake_meters import FakeClock, FakeMeter


def engine_with(
    tokenizer: Tokenizer,
    *,
    max_slots: int = 4,
    meter: FakeMeter | None = None,
    observer: ModelObserver | None = None,
    clock: FakeClock | None = None,
) -> Engine:
    config = EngineConfig(max_slots=max_slots, token_budget=64)
    return Engine(
        small_model(), tokenizer, fingerprint=FINGERPRINT, config=config, meter=meter, observer=observer,
        clock=clock or FakeClock(),
    )  # fmt: skip


def drain(engine: Engine, clock: FakeClock, *, step_s: float) -> dict[str, Finished]:
    """Steps to the end; each takes `step_s` by the clock, and shows only after it."""
    ends = {}
    while engine.has_work:
        ends |= {name: event for name, event in engine.step() if isinstance(event, Finished)}
        clock.now += step_s
    return ends


def timings(finished: Finished) -> Timings:
    assert finished.timings is not None
    return finished.timings


def test_timings_of_a_waiting_request_hold_its_queue_time(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    engine = engine_with(tiny_tokenizer, max_slots=1, clock=clock)
    engine.add(make_request("first", max_tokens=3))
    engine.add(make_request("second", max_tokens=3), arrival=-0.5)
    ends = drain(engine, clock, step_s=1.0)
    assert timings(ends["first"]) == Timings(queue_s=0.0, prefill_s=0.0, decode_s=2.0)
    assert timings(ends["second"]) == Timings(queue_s=3.5, prefill_s=0.0, decode_s=2.0)


def test_a_long_prompt_is_time_before_the_first_token(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    engine = engine_with(tiny_tokenizer, clock=clock)
    engine.add(make_request(prompt_ids=random_ids(1, 200), max_tokens=2))
    assert timings(drain(engine, clock, step_s=1.0)["a"]) == Timings(queue_s=0.0, prefill_s=3.0, decode_s=1.0)


def test_timings_of_an_aborted_request_end_at_the_abort(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    engine = engine_with(tiny_tokenizer, max_slots=1, clock=clock)
    engine.add(make_request("running", prompt_ids=random_ids(1, 200)))
    engine.add(make_request("waiting"))
    engine.step()
    clock.now = 2.0
    ends = {name: event for name, event in engine.abort_all() if isinstance(event, Finished)}
    assert timings(ends["running"]) == Timings(queue_s=0.0)
    assert timings(ends["waiting"]) == Timings(queue_s=2.0)


class WorkingMeter(FakeMeter):
    """A joule for each reading, which come once a step here: whoever is at work then pays."""

    def read(self) -> tuple[object, ...]:  # type: ignore[override]
        self.joules += 1.0
        return super().read()


def requests(num: int) -> list[GenerationRequest]:
    return [
        make_request(f"r{number}", prompt_ids=random_ids(number, 3 + 40 * number), max_tokens=4 + number)
        for number in range(num)
    ]


def test_M6_charges_of_requests_add_up_to_the_meter(tiny_tokenizer: Tokenizer) -> None:
    meter = WorkingMeter()
    engine = engine_with(tiny_tokenizer, meter=meter)
    results = run_all(engine, requests(6))
    charged = joules_of(outcome.finished for outcome in results.values())
    stats = engine.stats()
    assert all(outcome.finished.energy[0].joules > 0 for outcome in results.values())
    assert math.isclose(charged, sum(use.joules for use in stats.request_energy), rel_tol=1e-9)
    assert charged == pytest.approx(stats.energy[0].joules - 2, abs=2)  # all but the readings around the work


def test_charges_without_a_meter_are_empty(tiny_tokenizer: Tokenizer) -> None:
    engine = engine_with(tiny_tokenizer)
    assert run_all(engine, requests(1))["r0"].finished.energy == ()
    assert engine.stats().energy == ()


def test_energy_of_an_idle_engine_still_counts(tiny_tokenizer: Tokenizer) -> None:
    meter = FakeMeter()
    engine = engine_with(tiny_tokenizer, meter=meter)
    meter.joules = 30.0
    engine.step()
    assert engine.stats().energy[0].joules == 30.0
    assert engine.stats().request_energy[0].joules == 0.0


def test_steps_are_counted_with_their_requests_and_tokens(tiny_tokenizer: Tokenizer) -> None:
    engine = engine_with(tiny_tokenizer)
    run_all(
        engine, [make_request("a", random_ids(1, 10), max_tokens=5), make_request("b", random_ids(2, 20), max_tokens=2)]
    )
    stats = engine.stats()
    assert (stats.num_steps, stats.step_rows, stats.step_tokens) == (5, 7, 10 + 20 + 4 + 1)
    assert (stats.tokens_computed, stats.tokens_generated) == (30, 7)


def test_sampling_the_model_changes_no_text(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    observer = ModelObserver(small_model(), clock=clock)
    plain = run_all(engine_with(tiny_tokenizer), requests(4))
    engine = engine_with(tiny_tokenizer, observer=observer)
    for request in requests(4):
        engine.add(request)
    texts: dict[str, list[object]] = {}
    while engine.has_work:
        clock.now += 60.0  # a look each step
        for name, event in engine.step():
            texts.setdefault(name, []).append(event)
    assert texts == {name: outcome.events for name, outcome in plain.items()}
    assert engine.stats().num_observed > 10
    assert [layer.layer for layer in engine.stats().layers] == ["0", "1"]


def test_stats_come_back_from_json_as_they_were(tiny_tokenizer: Tokenizer) -> None:
    clock = FakeClock()
    engine = engine_with(tiny_tokenizer, meter=WorkingMeter(), observer=ModelObserver(small_model(), clock=clock))
    run_all(engine, requests(2))
    stats = engine.stats()
    assert stats.layers
    assert stats.energy
    assert EngineStats.from_dict(dataclasses.asdict(stats)) == stats


def test_steps_of_another_engine_are_added_up() -> None:
    first = EngineStats(num_steps=10, step_rows=30, step_tokens=40, step_seconds=1.0, num_running=7)
    later = dataclasses.replace(first, num_steps=15, step_rows=40, step_tokens=60, step_seconds=1.5)
    summed = EngineStats(num_steps=1).with_steps(later, since=first)
    assert (summed.num_steps, summed.step_rows, summed.step_tokens, summed.step_seconds) == (6, 10, 20, 0.5)
    assert summed.num_running == 0
