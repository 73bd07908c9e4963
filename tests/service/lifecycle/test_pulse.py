"""A supervisor that watches for signs of life."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from service.lifecycle.pulse import SAMPLE_S, Pulse, falls_silent


class Child:
    """Beats before those looks for which `plan` has 1; at its end the pipe is closed, if it `ends`."""

    def __init__(self, plan: list[int], *, ends: bool = False) -> None:
        self.reading_fd, self._fd = os.pipe()
        self._pulse, self._plan, self._ends = Pulse(self._fd), iter(plan), ends
        self.num_samples = 0

    async def pause(self, seconds: float) -> None:
        assert seconds == SAMPLE_S
        self.num_samples += 1
        beats = next(self._plan, None)
        if beats is None and self._ends:
            self.close()
        elif beats:
            self._pulse.beat()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.close()


async def test_a_child_that_has_begun_is_silent_after_so_many_looks_in_a_row(children: list[Child]) -> None:
    child = Child([0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0])
    children.append(child)
    assert await falls_silent(child.reading_fd, limit_s=3 * SAMPLE_S, pause=child.pause)
    assert child.num_samples == 11
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(child.reading_fd)


async def test_a_child_that_ends_is_not_silent(children: list[Child]) -> None:
    child = Child([0, 1, 1], ends=True)
    children.append(child)
    assert not await falls_silent(child.reading_fd, limit_s=2 * SAMPLE_S, pause=child.pause)


def test_a_child_does_not_wait_for_a_supervisor_that_does_not_look(children: list[Child]) -> None:
    child = Child([])
    children.append(child)
    for _ in range(100_000):  # more than a pipe takes
        child._pulse.beat()
    os.close(child.reading_fd)
    child._pulse.beat()


async def test_a_loop_beats_while_its_work_runs(children: list[Child]) -> None:
    child = Child([])
    children.append(child)
    async with child._pulse.beating():
        await asyncio.sleep(0)
        assert os.read(child.reading_fd, 16) == b"."
    os.close(child.reading_fd)
