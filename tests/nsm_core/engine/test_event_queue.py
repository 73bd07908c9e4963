from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.engine.event_queue import EventQueue
from nsm_core.engine.request import Event, Finished, FinishReason, PromptScored, TokenEvent

Item = TypeVar("Item")
END = Finished(reason=FinishReason.LENGTH)


def token(index: int) -> TokenEvent:
    return TokenEvent(index=index, token_id=index, text="x")


async def until_it_waits(work: AsyncIterator[Item]) -> asyncio.Task[Item]:
    task = asyncio.ensure_future(anext(work))  # type: ignore[arg-type]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@given(st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=8))
def test_batches_hold_the_ready_events_in_order(sizes: list[int]) -> None:
    async def run() -> None:
        queue, number, expected = EventQueue(), 0, []
        batches = queue.batches()
        for size in sizes:
            given = [token(number + offset) for offset in range(size)]
            number += size
            for event in given:
                queue.put(event)
            if given:
                expected.append(given)
                assert await anext(batches) == given
        queue.put(END)
        assert [batch async for batch in batches] == [[END]]

    asyncio.run(run())


async def test_slow_reader_gets_the_events_of_its_pause_in_one_batch() -> None:
    queue = EventQueue()
    task = await until_it_waits(queue.batches())
    queue.put(token(1))
    queue.put(token(2))
    assert await task == [token(1), token(2)]


async def test_events_are_single_and_end_with_the_end() -> None:
    queue = EventQueue()
    events: list[Event] = [token(1), token(2), END]
    for event in events:
        queue.put(event)
    assert [event async for event in queue.events()] == events


async def test_a_reader_that_is_behind_lets_others_run_before_each_batch() -> None:
    queue, turns = EventQueue(), []

    async def other() -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    queue.put(token(1))
    task = asyncio.create_task(other())
    async for batch in queue.batches():
        turns.append("reader")
        queue.put(END if len(turns) > 3 else token(2))
        if isinstance(batch[-1], Finished):
            break
    await task
    assert turns[:4] == ["other", "reader", "other", "reader"]


async def test_a_cancelled_reader_leaves_the_events_to_the_next() -> None:
    queue = EventQueue()
    task = await until_it_waits(queue.batches())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    queue.put(END)
    assert [batch async for batch in queue.batches()] == [[END]]


async def test_a_first_token_is_not_held_and_the_next_are_until_something_else_comes() -> None:
    queue, scored = EventQueue(), PromptScored(logprobs=())
    batches = queue.batches(hold_s=lambda: 3600.0)
    for event in (scored, token(1)):  # what comes before the tokens holds none of them up
        queue.put(event)
        assert await asyncio.wait_for(anext(batches), 60) == [event]
    task = await until_it_waits(batches)
    for index in (2, 3):
        queue.put(token(index))
    await asyncio.sleep(0)
    assert not task.done()
    queue.put(END)
    assert await task == [token(2), token(3), END]


async def test_hold_lasts_at_most_hold_s() -> None:
    queue = EventQueue()
    batches = queue.batches(hold_s=lambda: 0.001)
    queue.put(token(1))
    await anext(batches)
    task = await until_it_waits(batches)
    queue.put(token(2))
    assert await asyncio.wait_for(task, 60) == [token(2)]
    task = await until_it_waits(batches)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_end_that_is_there_ends_the_holding_before_it_begins() -> None:
    queue = EventQueue()
    batches = queue.batches(hold_s=lambda: 3600.0)
    queue.put(token(1))
    assert await anext(batches) == [token(1)]
    queue.put(token(2))
    queue.put(END)
    assert await asyncio.wait_for(anext(batches), 60) == [token(2), END]
