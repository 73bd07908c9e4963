"""States that stay with the engine: which are there, under what names, and what goes on from them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsm_core.config import EngineConfig
from nsm_core.engine.apply import Events
from nsm_core.engine.engine import Engine
from nsm_core.engine.held_states import HeldStates
from nsm_core.engine.request import EndState, Finished, FinishReason, Resume
from nsm_core.errors import EngineDead
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State, StateSpec, TensorSpec
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_engine, make_request, random_ids, run_one, small_model

SPEC = StateSpec((TensorSpec("position", (), torch.int64), TensorSpec("memory", (3,), torch.float32)))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def state(number: int) -> State:
    return {
        "position": torch.tensor([number], device=DEVICE),
        "memory": torch.full((1, 3), float(number), device=DEVICE),
    }


class Held(HeldStates):
    """Of a pool with one row, whose states come from it."""

    def __init__(self, max_states: int = 3, max_on_device: int = 10) -> None:
        size, self.pool = SPEC.num_bytes, StatePool(SPEC, 1, DEVICE)
        self.pool.lease(0)
        super().__init__(self.pool, max_bytes=max_states * size, max_device_bytes=max_on_device * size)

    def put(self, number: int) -> int:
        self.pool.write(0, state(number))
        held = self.hold(0)
        self.flush()
        return held

    def got(self, number: int) -> float:
        """What the state of that number holds, once it is in the pool."""
        start = self.take(number)
        assert start is not None
        self.pool.write(0, state(0))
        start.copy_to(0)
        self.flush()
        return float(self.pool.gather((0,))["memory"][0, 0])


def test_the_least_recently_used_states_go_with_their_names() -> None:
    held = Held(max_states=2)
    first, second = held.put(1), held.put(2)
    held.name("one", first, b"about one")
    held.name("two", second, b"about two")
    assert held.take(first) is not None  # used again
    third = held.put(3)
    assert (held.find("one"), held.find("two")) == (held._named["one"], None)
    assert held.take(second) is None
    assert held.pack(third) == SPEC.pack(state(3))
    assert held.num_states == 2


def test_a_state_whose_copy_fails_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    before = held.put(1)
    number = held.hold(0)
    with monkeypatch.context() as broken, pytest.raises(torch.OutOfMemoryError):
        broken.setattr("nsm_core.engine.held_states.copy_rows", fail_for_memory)
        held.flush()
    held.flush()
    assert held.take(number) is None
    assert held.got(before) == 1.0


def fail_for_memory(_: object) -> None:
    raise torch.OutOfMemoryError


def test_a_name_moves_on_and_a_state_without_any_goes() -> None:
    held = Held()
    first, second = held.put(1), held.put(2)
    held.name("one", first, b"1")
    held.name("fork", first, b"1")
    held.name("one", second, b"2")
    found = held.find("fork")
    assert found is not None
    assert (found.number, held.num_states) == (first, 2)
    held.forget("fork")
    held.forget("fork")
    assert (held.take(first), held.num_states) == (None, 1)
    held.name("late", first, b"")  # it is not here any more
    assert held.find("late") is None


def test_numbers_of_another_engine_mean_nothing() -> None:
    one, other = Held(), Held()
    assert other.take(one.put(1)) is None


def test_a_state_that_a_request_waits_to_start_from_keeps_its_row() -> None:
    held = Held(max_states=1)
    first = held.put(1)
    start = held.take(first)
    assert start is not None
    for number in range(2, 9):
        held.put(number)
    assert held.take(first) is None
    start.copy_to(0)
    held.flush()
    assert held.pool.gather((0,))["memory"][0].tolist() == [1.0] * 3
    del start
    assert held.got(held.put(9)) == 9.0


@pytest.mark.gpu
def test_the_least_recently_used_move_to_the_host_and_back_with_their_bits() -> None:
    held = Held(max_states=8, max_on_device=2)
    numbers = [held.put(number) for number in range(5)]
    assert (held.num_states, held.num_on_device) == (5, 2)
    for number, at in enumerate(numbers):
        assert held.got(at) == number
        assert held.pack(at) == SPEC.pack(state(number))


@pytest.mark.parametrize("stop", [(), ("th",)])
def test_a_turn_from_a_held_state_equals_one_from_its_bytes(tiny_tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    first = make_request("a", random_ids(1, 5), temperature=1.0, max_tokens=12, stop=stop)
    by_bytes = run_one(engine, first).finished.end_state
    by_number = run_one(engine, dataclasses.replace(first, hold_state=True)).finished.end_state
    assert by_bytes is not None
    assert by_number is not None
    assert by_number.held is not None
    assert engine.held.pack(by_number.held) == by_bytes.state
    assert dataclasses.replace(by_number, state=by_bytes.state, held=None) == by_bytes
    ends = []
    for end in (by_bytes, by_number, by_number):  # it stays for another
        ids = (*(() if end.pending is None else (end.pending,)), 7, 8)
        ends.append(run_one(engine, make_request("b", ids, resume=resume_of(end), temperature=1.0)).finished.end_state)
    assert ends[0] == ends[1] == ends[2]


def resume_of(end: EndState) -> Resume:
    return Resume(
        state=end.state,
        held=end.held,
        position=end.position,
        fingerprint=FINGERPRINT,
        generated_counts=end.generated_counts,
    )


def test_a_request_from_a_state_that_has_gone_is_refused(tiny_tokenizer: Tokenizer) -> None:
    engine = make_engine(small_model(), tiny_tokenizer)
    resume = Resume(state=b"", held=5, position=3, fingerprint=FINGERPRINT, generated_counts={})
    with pytest.raises(EngineDead, match="does not hold the state any more"):
        engine.add(make_request("a", (1,), resume=resume))
    assert not engine.has_work


def plain_engine(tokenizer: Tokenizer) -> Engine:
    """Its free rows are not poisoned: copies wait for the end of their step."""
    config = EngineConfig(max_slots=2, token_budget=16, queue_limit=8)
    return Engine(small_model(), tokenizer, fingerprint=FINGERPRINT, config=config)


def end_of(events: Events, request_id: str) -> Finished | None:
    return next((end for name, end in events if name == request_id and isinstance(end, Finished)), None)


def test_states_that_cannot_be_copied_are_gone_and_no_request_ends_for_it(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for is_broken in (False, True):
        engine = plain_engine(tiny_tokenizer)
        engine.add(dataclasses.replace(make_request("a", (5, 6), max_tokens=2), hold_state=True))
        engine.add(make_request("b", (7,), max_tokens=6))
        events: Events = []
        with monkeypatch.context() as broken:
            if is_broken:
                broken.setattr("nsm_core.engine.held_states.copy_rows", fail_for_memory)
            while end_of(events, "a") is None:
                events += engine.step()
        while engine.has_work:
            events += engine.step()
        ended = [end_of(events, name) for name in "ab"]
        assert [end and end.reason for end in ended] == [FinishReason.LENGTH] * 2
        assert ended[0] is not None
        assert ended[0].end_state is not None
        assert ended[0].end_state.held is not None
        assert (engine.held.pack(ended[0].end_state.held) is None) is is_broken
        ends.append(ended[1] and ended[1].end_state)
    assert ends[0] == ends[1]
    assert "could not be copied" in caplog.text


def test_a_lost_device_ends_the_engine_when_states_are_copied(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine = plain_engine(tiny_tokenizer)
    engine.add(dataclasses.replace(make_request("a", (5, 6), max_tokens=1), hold_state=True))
    monkeypatch.setattr("nsm_core.engine.held_states.copy_rows", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()
