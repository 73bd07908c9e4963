from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from nsm_core.engine import stream_pace
from nsm_core.engine.event_queue import EventQueue
from nsm_core.engine.request import Event, Finished, FinishReason, TokenEvent
from nsm_core.engine.stream_pace import StreamPace, Write
from nsm_core.engine.token_text import TokenText
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_request


class Clock:
    """A `time` that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Receiver:
    """Takes `cost_s` to hand on."""

    def __init__(self, clock: Clock, cost_s: float) -> None:
        self._clock, self._cost_s = clock, cost_s
        self.num_handed_on = 0
        self.twice = asyncio.Event()

    def hand_on(self, writes: list[Write]) -> bool:
        self._clock.now += self._cost_s
        self.num_handed_on += 1
        if self.num_handed_on == 2:
            self.twice.set()
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stream_pace, "time", made)
    return made


def step(pace: StreamPace, receiver: Receiver) -> None:
    pace.add(receiver)
    pace.step_ended()


async def test_cheap_streams_are_handed_on_at_every_step(clock: Clock) -> None:
    pace, receiver = StreamPace(0.02), Receiver(clock, 0.0001)
    for _ in range(50):
        clock.now += 0.01
        step(pace, receiver)
    assert (receiver.num_handed_on, pace.interval_s) == (50, 0.0)


async def test_costly_streams_wait_four_times_as_long_as_they_take_and_never_above_the_limit(clock: Clock) -> None:
    pace, receiver = StreamPace(0.02), Receiver(clock, 0.004)
    for _ in range(200):
        clock.now += 0.02
        step(pace, receiver)
    assert pace.interval_s == pytest.approx(0.016, rel=0.01)
    slow = StreamPace(0.02)
    for _ in range(200):
        clock.now += 0.1
        step(slow, Receiver(clock, 0.5))
    assert slow.interval_s == 0.02


async def test_without_a_limit_nothing_ever_waits(clock: Clock) -> None:
    pace, receiver = StreamPace(), Receiver(clock, 0.5)
    for _ in range(20):
        step(pace, receiver)
    assert receiver.num_handed_on == 20


async def test_tokens_that_wait_are_handed_on_by_a_timer(clock: Clock) -> None:
    pace, receiver = StreamPace(0.005), Receiver(clock, 0.1)
    step(pace, receiver)
    clock.now -= 0.1  # the next step comes before the interval is over
    step(pace, receiver)
    assert receiver.num_handed_on == 1
    await asyncio.wait_for(receiver.twice.wait(), 60)


class Writer:
    """Notes when its tokens are taken and when they are written."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def hand_on(self, writes: list[Write]) -> bool:
        if self._name == "broken":
            raise RuntimeError("broken")
        self._notes.append(f"take {self._name}")
        writes.append(functools.partial(self._notes.append, f"write {self._name}"))
        return False


async def test_the_streams_of_a_round_are_written_when_all_were_taken() -> None:
    pace, notes = StreamPace(), list[str]()
    for name in "ab":
        pace.add(Writer(name, notes))
    pace.step_ended()
    assert notes == ["take a", "take b", "write a", "write b"]


async def test_a_stream_that_fails_does_not_keep_what_was_taken_of_others() -> None:
    pace, notes = StreamPace(), list[str]()
    for name in ("a", "broken"):
        pace.add(Writer(name, notes))
    with pytest.raises(RuntimeError):
        pace.step_ended()
    assert notes == ["take a", "write a"]


def token(index: int) -> TokenEvent:
    return TokenEvent(index=index, token_id=index, text=f"<{index}>")


END = Finished(reason=FinishReason.LENGTH)


class Reader:
    """Reads a queue whose tokens are diverted after the first."""

    def __init__(self, *, takes: bool = True) -> None:
        self.pace, self.takes = StreamPace(), takes
        self.queue = EventQueue(self.pace)
        self.taken: list[str] = []
        self.batches: list[list[Event]] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self.queue.batches():
            self.batches.append(batch)
            self.queue.divert(self._take)

    def _take(self, ids: Sequence[int], texts: Sequence[str]) -> Write | None:
        return functools.partial(self.taken.extend, list(texts)) if self.takes else None

    async def step(self, *events: Event) -> None:
        for event in events:
            self.queue.put(event)
        self.pace.step_ended()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_tokens_are_taken_while_the_reader_waits_and_the_end_is_read() -> None:
    reader = Reader()
    await asyncio.sleep(0)
    await reader.step(token(1))
    await reader.step(token(2))
    await reader.step(token(3), token(4))
    await reader.step(token(5), END)
    await reader.task
    assert reader.taken == ["<2>", "<3>", "<4>"]
    assert reader.batches == [[token(1)], [token(5), END]]


async def test_tokens_that_are_not_taken_are_read_in_order() -> None:
    reader = Reader(takes=False)
    await asyncio.sleep(0)
    await reader.step(token(1))
    await reader.step(token(2))
    reader.takes = True
    await reader.step(token(3))
    await reader.step(END)
    await reader.task
    assert reader.taken == ["<3>"]
    assert reader.batches == [[token(1)], [token(2)], [END]]


async def test_tokens_before_the_reader_is_back_are_left_to_it() -> None:
    reader = Reader()
    await asyncio.sleep(0)
    await reader.step(token(1))
    reader.queue.put(token(2))
    reader.takes = False
    reader.pace.step_ended()  # wakes the reader
    reader.takes = True
    reader.queue.put(token(3))
    reader.pace.step_ended()  # the reader has not run yet
    await reader.step(END)
    await reader.task
    assert reader.taken == []
    assert reader.batches == [[token(1)], [token(2), token(3), END]]


async def test_the_work_of_woken_readers_counts_and_their_tokens_come_together(
    clock: Clock, tiny_tokenizer: Tokenizer
) -> None:
    pace, text = StreamPace(0.02), TokenText(tiny_tokenizer, make_request("a", max_tokens=1_000))
    queue, sizes = EventQueue(pace, text), list[int]()

    async def read() -> None:
        async for batch in queue.batches():
            clock.now += 0.004  # what a batch costs, however long it is
            sizes.append(len(batch))

    reading = asyncio.create_task(read())
    for _ in range(400):
        clock.now += 0.002
        queue.put_id(65)
        pace.step_ended()
        if pace._timer is not None and clock.now - pace._last_round_at >= pace.interval_s:
            pace._timer.cancel()
            pace._hand_on_late()
        for _ in range(6):
            await asyncio.sleep(0)
    queue.put(Finished(reason=FinishReason.LENGTH))
    await reading
    assert sum(sizes) == 401
    assert sizes[0] == 1
    assert pace.interval_s == pytest.approx(0.016, rel=0.05)
    assert max(sizes[50:]) > 1
