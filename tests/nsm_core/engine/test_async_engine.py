"""The engine's thread seen from asyncio: nothing hangs, nothing is lost, the loop never waits for a step."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from torch import Tensor

from nsm_core.engine import async_engine, generation_handle
from nsm_core.engine.async_engine import AsyncEngine, GenerationHandle
from nsm_core.engine.request import Finished, FinishReason, GenerationRequest, TokenEvent
from nsm_core.errors import DeadlineExceeded, EngineDead, InvalidRequest, NsmError, Overloaded, StateMismatch
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    ScriptedModel,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_one,
    small_model,
)


class GatedModel(ScriptedModel):
    """Every token waits for `gate`, and tells that it waits. `failure` is raised instead, once it is set."""

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__([5] * 1000, vocab_size=512)
        self.gate = threading.Semaphore(1000 if is_open else 0)
        self.is_waiting = threading.Event()
        self.failure: Exception | None = None
        self.num_steps = 0

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        self.num_steps += 1
        self.is_waiting.set()
        self.gate.acquire()
        self.is_waiting.clear()
        if self.failure is not None:
            raise self.failure
        return super().step(ids, state)

    async def until_waiting(self) -> None:
        assert await asyncio.to_thread(self.is_waiting.wait, 30)


@pytest.fixture
def model() -> GatedModel:
    return GatedModel(is_open=False)


@pytest_asyncio.fixture
async def gated(model: GatedModel, tiny_tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    """Two slots, one place in the queue; nothing moves before the gate opens."""
    engine = AsyncEngine(make_engine(model, tiny_tokenizer, max_slots=2, queue_limit=1))
    await engine.start()
    yield engine
    model.gate.release(1000)
    await engine.stop()


@pytest_asyncio.fixture
async def engine(tiny_tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(make_engine(small_model(), tiny_tokenizer, max_slots=4, token_budget=40))
    await engine.start()
    yield engine
    await engine.stop()


async def collect(handle: GenerationHandle) -> Outcome:
    return Outcome([event async for event in handle.events()])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # another thread makes it true, without telling
            await asyncio.sleep(0.001)


async def test_events_are_those_of_the_engine(engine: AsyncEngine, tiny_tokenizer: Tokenizer) -> None:
    request = make_request(prompt_ids=random_ids(1, 30), prompt_logprobs=1, logprobs=1)
    expected = run_one(make_engine(small_model(), tiny_tokenizer, max_slots=4, token_budget=40), request)
    assert (await collect(engine.submit(request))).events == expected.events


async def test_many_clients_that_come_and_go(engine: AsyncEngine, tiny_tokenizer: Tokenizer) -> None:
    choose = random.Random(1)

    async def client(number: int) -> None:
        request = make_request(str(number), random_ids(number, 1 + number), max_tokens=10)
        handle, outcome = engine.submit(request), Outcome()
        num_wanted = choose.choice([0, 1, 5, 100, 100])
        async for event in handle.events():
            outcome.events.append(event)
            if len(outcome.tokens) == num_wanted:
                handle.cancel()
        solo = run_one(make_engine(small_model(), tiny_tokenizer), request)
        assert outcome.ids == solo.ids[: len(outcome.ids)]
        assert outcome.finished.reason in (
            {FinishReason.ABORT, FinishReason.LENGTH} if num_wanted < 100 else {"length"}
        )

    async with asyncio.TaskGroup() as clients:
        for number in range(30):
            clients.create_task(client(number))
    assert engine.stats().num_running == engine.stats().num_waiting == 0


async def test_S6_cancel_takes_effect_within_one_step(gated: AsyncEngine, model: GatedModel) -> None:
    handle = gated.submit(make_request(max_tokens=900))
    events = handle.events()
    model.gate.release(3)
    for index in (1, 2, 3):
        token = await anext(events)
        assert isinstance(token, TokenEvent)
        assert token.index == index
    await model.until_waiting()
    handle.cancel()
    handle.cancel()
    model.gate.release()  # the step that was running when it was cancelled
    rest = [event async for event in events]
    assert [type(event) for event in rest] == [TokenEvent, Finished]
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason is FinishReason.ABORT
    assert model.num_steps == 4
    handle.cancel()  # when all is over it means nothing


async def test_the_loop_never_waits_for_a_step(gated: AsyncEngine, model: GatedModel) -> None:
    running = gated.submit(make_request("running"))
    await model.until_waiting()
    waiting = gated.submit(make_request("waiting"))  # all of this while a step runs
    waiting.cancel()
    assert gated.stats().num_running == 0
    assert gated.is_ready()
    model.gate.release(100)
    assert (await collect(waiting)).finished.reason is FinishReason.ABORT
    assert (await collect(running)).finished.reason is FinishReason.LENGTH


async def test_the_queue_is_bounded_at_submit(gated: AsyncEngine, model: GatedModel) -> None:
    handles = [gated.submit(make_request(name)) for name in "abc"]
    for _ in range(3):
        with pytest.raises(Overloaded, match="1 requests may wait") as refusal:
            gated.submit(make_request("d"))
        assert refusal.value.retry_after_s > 0
    model.gate.release(1000)
    await collect(handles[0])
    assert (await collect(gated.submit(make_request("d")))).finished.reason is FinishReason.LENGTH


async def test_bad_requests_are_refused_at_submit(engine: AsyncEngine) -> None:
    end = (await collect(engine.submit(make_request()))).end_state
    resume, pending = resume_from(end)
    with pytest.raises(InvalidRequest, match="at least 1 token"):
        engine.submit(make_request(prompt_ids=()))
    other = type(resume)(state=resume.state, position=1, fingerprint="other", generated_counts={})
    with pytest.raises(StateMismatch):
        engine.submit(make_request(prompt_ids=pending, resume=other))
    first = engine.submit(make_request("same"))
    with pytest.raises(InvalidRequest, match="request id same is in use"):
        engine.submit(make_request("same"))
    assert (await collect(first)).finished.reason is FinishReason.LENGTH


async def test_a_deadline_ends_a_request(tiny_tokenizer: Tokenizer) -> None:
    engine = AsyncEngine(make_engine(GatedModel(), tiny_tokenizer, clock=time.monotonic))
    await engine.start()
    finished = (await collect(engine.submit(make_request(deadline=time.monotonic())))).finished
    await engine.stop()
    assert finished.reason is FinishReason.ERROR
    assert isinstance(finished.error, DeadlineExceeded)


async def test_a_lost_device_ends_every_request_and_the_engine(
    gated: AsyncEngine, model: GatedModel, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [gated.submit(make_request(name)) for name in "abc"]
    await model.until_waiting()
    model.failure = RuntimeError("CUDA error: the device fell off")
    model.gate.release(1000)
    for handle in handles:
        finished = (await collect(handle)).finished
        assert finished.reason is FinishReason.ERROR
        assert isinstance(finished.error, EngineDead)
        assert "RuntimeError" in str(finished.error)
        assert finished.prompt_tokens == 1
    assert not gated.is_ready()
    with pytest.raises(EngineDead, match="RuntimeError"):
        gated.submit(make_request("later"))
    assert "the device fell off" in caplog.text


async def test_request_submitted_to_a_dying_engine_ends_with_an_error(
    gated: AsyncEngine, model: GatedModel, caplog: pytest.LogCaptureFixture
) -> None:
    first = gated.submit(make_request("first"))
    await model.until_waiting()
    model.failure = RuntimeError("CUDA error: gone")
    model.gate.release(1000)
    gated._thread.join()  # blocks the loop on purpose: it has not heard of the failure yet
    second = gated.submit(make_request("second"))
    for handle in (first, second):
        assert isinstance((await collect(handle)).finished.error, EngineDead)
    assert len(caplog.records) == 1


async def test_stop_aborts_running_and_waiting_requests(gated: AsyncEngine, model: GatedModel) -> None:
    handles = [gated.submit(make_request(name, max_tokens=900)) for name in "abc"]
    await model.until_waiting()
    stopping = asyncio.create_task(gated.stop())
    await asyncio.sleep(0)
    assert not gated.is_ready()
    with pytest.raises(EngineDead, match="stopping"):
        gated.submit(make_request("late"))
    model.gate.release(1000)
    assert [(await collect(handle)).finished.reason for handle in handles] == [FinishReason.ABORT] * 3
    await stopping
    await gated.stop()
    assert gated.stats().num_running == 0
    with pytest.raises(EngineDead):
        gated.submit(make_request("later"))


async def test_an_engine_that_was_not_started_refuses(tiny_tokenizer: Tokenizer) -> None:
    engine = AsyncEngine(make_engine(small_model(), tiny_tokenizer))
    assert not engine.is_ready()
    with pytest.raises(EngineDead, match="not started"):
        engine.submit(make_request())
    await engine.stop()


async def test_the_heartbeat_of_an_idle_engine_stays_fresh(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await collect(engine.submit(make_request()))
    monkeypatch.setattr(async_engine, "IDLE_TURN_S", 0.01)
    engine.submit(make_request("wakes it")).cancel()
    before = engine._heartbeat
    await until(lambda: engine._heartbeat > before + 0.05)
    assert engine.is_ready()
    assert engine.stats().num_steps < 20  # turns without work are no steps


async def test_a_hanging_step_is_not_ready(
    gated: AsyncEngine, model: GatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated.submit(make_request())
    await model.until_waiting()
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 0.02)
    await until(lambda: not gated.is_ready())
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 60.0)
    assert gated.is_ready()


async def test_X15_a_deadline_passes_in_a_step_that_hangs(
    gated: AsyncEngine, model: GatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_handle, "DEADLINE_GRACE_S", 0.05)
    running = gated.submit(make_request("running", deadline=time.monotonic() + 1.0))
    model.gate.release()
    waiting = gated.submit(make_request("waiting", deadline=time.monotonic() + 1.0))
    for handle in (running, waiting):
        async with asyncio.timeout(60):
            finished = (await collect(handle)).finished
        assert finished.reason is FinishReason.ERROR
        assert isinstance(finished.error, DeadlineExceeded)
    assert model.is_waiting.is_set()  # the step has not ended
    model.gate.release(1000)
    await until(lambda: gated.stats().num_running == gated.stats().num_waiting == 0)
    assert (await collect(gated.submit(make_request("later")))).finished.reason is FinishReason.LENGTH


async def test_X15_a_hanging_engine_refuses_new_requests_at_once(
    gated: AsyncEngine, model: GatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = gated.submit(make_request())
    await model.until_waiting()
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 0.02)
    await until(lambda: not gated.is_ready())
    with pytest.raises(EngineDead, match="in one step"):
        gated.submit(make_request("late"))
    assert gated.stats().heartbeat_age_s > 0.02
    monkeypatch.setattr(async_engine, "HEARTBEAT_LIMIT_S", 60.0)
    model.gate.release(1000)
    assert (await collect(running)).finished.reason is FinishReason.LENGTH


async def test_one_call_to_the_loop_per_step(gated: AsyncEngine, model: GatedModel) -> None:
    loop, num_calls = asyncio.get_running_loop(), 0
    inner = loop.call_soon_threadsafe

    def counting(callback: Callable[..., object], *args: object) -> asyncio.Handle:
        nonlocal num_calls
        num_calls += callback == gated._deliver
        return inner(callback, *args)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[assignment,method-assign]
    handles = [gated.submit(make_request(name, max_tokens=20)) for name in "ab"]
    model.gate.release(1000)
    for handle in handles:
        assert len((await collect(handle)).tokens) == 20
    assert num_calls == gated.stats().num_steps <= 21


async def test_stats_are_a_copy(engine: AsyncEngine) -> None:
    await collect(engine.submit(make_request(max_tokens=3)))
    stats = engine.stats()
    stats.num_steps = -1
    assert engine.stats().num_steps == 3
    assert engine.stats().tokens_generated == 3


def test_a_loop_that_ends_first_leaves_no_thread_behind(
    model: GatedModel, tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncEngine(make_engine(model, tiny_tokenizer))

    async def leave_without_stop() -> None:
        await engine.start()
        engine.submit(make_request())
        await model.until_waiting()

    asyncio.run(leave_without_stop())
    model.gate.release(1000)
    engine._thread.join(timeout=60)
    assert not engine._thread.is_alive()
    assert [record.levelno for record in caplog.records][-1] == logging.WARNING


async def test_refusals_of_the_engine_itself_reach_the_client(
    gated: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object, **_: object) -> None:
        raise NsmError("no")

    monkeypatch.setattr(gated._engine, "add", refuse)
    finished = (await collect(gated.submit(make_request()))).finished
    assert finished.reason is FinishReason.ERROR
    assert str(finished.error) == "no"


async def test_a_reader_that_comes_late_gets_all_that_is_there(tiny_tokenizer: Tokenizer) -> None:
    engine = AsyncEngine(make_engine(small_model(), tiny_tokenizer))
    await engine.start()
    handle, longer = (engine.submit(make_request(name, max_tokens=num)) for name, num in (("a", 5), ("b", 50)))
    outcome = Outcome([event async for event in longer.events()])
    batches = [batch async for batch in handle.batches()]
    assert [[type(event) for event in batch] for batch in batches] == [[*[TokenEvent] * 5, Finished]]
    again = engine.submit(make_request("c", max_tokens=50))
    events = [event for batch in [batch async for batch in again.batches()] for event in batch]
    assert Outcome(events).ids == outcome.ids
    await engine.stop()


async def test_R10_error_while_adding_a_request_ends_that_request_alone(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = engine._engine.add

    def fail_once(request: GenerationRequest, **given: float) -> None:
        if request.request_id == "bad":
            raise OverflowError
        add(request, **given)

    monkeypatch.setattr(engine._engine, "add", fail_once)
    bad, good = engine.submit(make_request("bad")), engine.submit(make_request("good", max_tokens=5))
    error = (await collect(bad)).finished.error
    assert isinstance(error, EngineDead)
    assert "could not be queued: OverflowError" in str(error)
    assert len((await collect(good)).ids) == 5
    assert engine.is_ready()
    assert "could not be queued" in caplog.text
