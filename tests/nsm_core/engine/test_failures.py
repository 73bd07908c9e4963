"""A step that fails ends its own requests; the engine ends only with what is broken."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import MAX_FAILURES_IN_A_ROW, Engine, is_device_lost
from nsm_core.engine.request import Finished, FinishReason, Resume
from nsm_core.errors import EngineDead, StepFailed
from nsm_core.execution.eager import EagerExecutor
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FINGERPRINT,
    Outcome,
    assert_log_and_state_agree,
    make_request,
    random_ids,
    run_one,
    small_model,
)


class FailingExecutor(EagerExecutor):
    """Raises `error` in its next `num_failures` calls, after the rows were changed."""

    error: Exception = ZeroDivisionError("a fault")
    num_failures = 0

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        hidden = super().step(rows, ids)
        self._fail()
        return hidden

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        hidden = super().read(rows, ids)
        self._fail()
        return hidden

    def _fail(self) -> None:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise self.error


class FailingEngine:
    """An engine of 4 slots, free rows NaN, and its executor."""

    def __init__(self, tokenizer: Tokenizer, *, max_slots: int = 4) -> None:
        self.executors: list[FailingExecutor] = []
        config = EngineConfig(max_slots=max_slots, token_budget=16, queue_limit=64)
        self.engine = Engine(
            small_model(), tokenizer, fingerprint=FINGERPRINT, config=config, executor=self._make, poison=True
        )

    @property
    def executor(self) -> FailingExecutor:
        return self.executors[0]

    def _make(self, model: object, *, num_rows: int, poison: bool) -> FailingExecutor:
        self.executors.append(FailingExecutor(model, num_rows=num_rows, poison=poison))  # type: ignore[arg-type]
        return self.executors[-1]


@pytest.fixture
def failing(tiny_tokenizer: Tokenizer) -> FailingEngine:
    return FailingEngine(tiny_tokenizer)


def step_into(engine: Engine, results: dict[str, Outcome]) -> None:
    for request_id, event in engine.step():
        results[request_id].events.append(event)


def assert_failed(outcome: Outcome) -> None:
    finished = outcome.finished
    assert finished.reason is FinishReason.ERROR
    assert isinstance(finished.error, StepFailed)
    assert "ZeroDivisionError" in str(finished.error)
    assert finished.end_state is None


def test_only_the_requests_of_a_failing_step_end(failing: FailingEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Six requests for four slots: the two that wait run as if nothing had been, in the same rows."""
    engine = failing.engine
    requests = {name: make_request(name, random_ids(index, 3)) for index, name in enumerate("abcdef")}
    results = {name: Outcome() for name in requests}
    for request in requests.values():
        engine.add(request)
    step_into(engine, results)
    failing.executor.num_failures = 1
    step_into(engine, results)
    for name in "abcd":
        assert len(results[name].tokens) == 1
        assert_failed(results[name])
    assert engine.stats().num_running == 0
    assert failing.executor.pool.num_leased == 0
    while engine.has_work:
        step_into(engine, results)
    for name in "ef":
        assert results[name].ids == run_one(engine, requests[name]).ids
        assert_log_and_state_agree(small_model(), results[name].end_state)
    assert engine.stats().num_failed_steps == 1
    assert "a fault" in caplog.text


def test_request_outside_the_failed_step_continues(failing: FailingEngine) -> None:
    """The long prompts of two owners take turns, sixteen tokens a step."""
    engine = failing.engine
    requests = [
        dataclasses.replace(make_request(name, random_ids(seed, 40)), owner=name)
        for seed, name in enumerate(("one", "two"))
    ]
    results = {request.request_id: Outcome() for request in requests}
    for request in requests:
        engine.add(request)
    step_into(engine, results)
    failing.executor.num_failures = 1
    step_into(engine, results)
    assert_failed(results["two"])
    while engine.has_work:
        step_into(engine, results)
    assert results["one"].ids == run_one(engine, requests[0]).ids


def test_a_state_that_cannot_be_opened_ends_its_request_alone(
    failing: FailingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = run_one(failing.engine, make_request("first", random_ids(0, 3))).end_state
    resume = Resume(state=end.state, position=end.position, fingerprint=FINGERPRINT, generated_counts={})
    pool = failing.executor.pool
    monkeypatch.setattr(pool, "unpack", lambda row, raw: 1 / 0)
    assert_failed(run_one(failing.engine, make_request("second", (1,), resume=resume)))
    monkeypatch.undo()
    assert pool.num_leased == 0
    assert run_one(failing.engine, make_request("third", (1,), resume=resume)).finished.reason is FinishReason.LENGTH


def test_tokens_before_the_failure_are_delivered(failing: FailingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends in the very step in which another's end fails: its own end is kept."""
    engine = failing.engine
    for name, max_tokens in (("a", 1), ("b", 2), ("c", 1)):
        engine.add(make_request(name, (5,), max_tokens=max_tokens, keep_state=name == "c"))
    monkeypatch.setattr(failing.executor.pool, "pack", lambda row: 1 / 0)
    results = {name: Outcome() for name in "abc"}
    step_into(engine, results)
    assert results["a"].finished.reason is FinishReason.LENGTH
    assert len(results["b"].tokens) == 1
    assert_failed(results["b"])
    assert_failed(results["c"])
    assert not engine.has_work


def test_failures_in_a_row_end_the_engine_and_others_do_not(failing: FailingEngine) -> None:
    engine = failing.engine
    for turn in range(3 * MAX_FAILURES_IN_A_ROW):
        failing.executor.num_failures = turn % MAX_FAILURES_IN_A_ROW > 0
        assert (run_one(engine, make_request()).finished.error is None) == (turn % MAX_FAILURES_IN_A_ROW == 0)
    failing.executor.num_failures = MAX_FAILURES_IN_A_ROW
    engine.add(make_request())
    with pytest.raises(ZeroDivisionError):
        engine.step()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (MemoryError("no memory to draw tokens"), False),
        (RuntimeError("rows [1] must be leased and distinct"), False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_lost_device_ends_the_engine_at_once(failing: FailingEngine, error: Exception, is_lost: bool) -> None:
    assert is_device_lost(error) is is_lost
    failing.executor.error, failing.executor.num_failures = error, 1
    failing.engine.add(make_request())
    if is_lost:
        with pytest.raises(type(error)):
            failing.engine.step()
    else:
        failing.engine.step()
        assert not failing.engine.has_work


async def test_thread_survives_one_failure_and_ends_after_many(
    failing: FailingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncEngine(failing.engine)
    await engine.start()

    async def ask() -> Finished:
        return Outcome([event async for event in engine.submit(make_request()).events()]).finished

    failing.executor.num_failures = 1
    assert isinstance((await ask()).error, StepFailed)
    assert engine.is_ready()
    assert (await ask()).reason is FinishReason.LENGTH
    failing.executor.num_failures = MAX_FAILURES_IN_A_ROW
    errors = [type((await ask()).error) for _ in range(MAX_FAILURES_IN_A_ROW)]
    assert errors == [*[StepFailed] * (MAX_FAILURES_IN_A_ROW - 1), EngineDead]
    assert not engine.is_ready()
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        engine.submit(make_request())
    await asyncio.wait_for(engine.stop(), 60)
    assert "a fault" in caplog.text
