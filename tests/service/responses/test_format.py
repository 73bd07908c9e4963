"""Events of responses as they are written to a connection."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from nsm_core.errors import Overloaded
from service.generate.choices import EVENTS_AT_ONCE
from service.responses.format import frames


async def given(*sizes: int, error: Exception | None = None) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Batches of so many events, numbered through; then `error`."""
    number = 0
    for size in sizes:
        yield [{"type": "response.output_text.delta", "sequence_number": number + offset} for offset in range(size)]
        number += size
    if error is not None:
        raise error


async def written(*sizes: int, starting_after: int = -1, error: Exception | None = None) -> list[list[dict[str, Any]]]:
    """The events of each write."""
    parts = [
        part async for part in frames(given(*sizes, error=error), request_id="req_1", starting_after=starting_after)
    ]
    assert all(part.endswith(b"\n\n") for part in parts)
    return [[json.loads(line[6:]) for line in part.split(b"\n") if line.startswith(b"data: ")] for part in parts]


def numbers(parts: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[event["sequence_number"] for event in part] for part in parts]


async def test_what_is_ready_together_is_one_write() -> None:
    assert numbers(await written(1, 3, 2)) == [[0], [1, 2, 3], [4, 5]]


async def test_a_write_has_a_bound() -> None:
    parts = numbers(await written(2 * EVENTS_AT_ONCE + 1))
    assert [len(part) for part in parts] == [EVENTS_AT_ONCE, EVENTS_AT_ONCE, 1]
    assert [number for part in parts for number in part] == list(range(2 * EVENTS_AT_ONCE + 1))


@pytest.mark.parametrize(("after", "rest"), [(0, [[1, 2], [3]]), (1, [[2], [3]]), (2, [[3]]), (3, [])])
async def test_S9_reading_on_may_begin_within_a_batch(after: int, rest: list[list[int]]) -> None:
    assert numbers(await written(3, 1, starting_after=after)) == rest


async def test_S10_a_number_behind_the_last_event_is_an_error() -> None:
    """Its reader has another stream's number, and not what this one had."""
    for sizes, last in (((3, 1), 3), ((), -1)):
        ((event,),) = await written(*sizes, starting_after=4)
        assert event["type"] == "error"
        assert f"at most {last}, this stream's last id, got 4" in event["message"]


async def test_an_error_is_told_by_the_number_of_the_last_event() -> None:
    *_, last = await written(3, error=Overloaded("full"))
    assert [(event["type"], event["code"], event["sequence_number"]) for event in last] == [("error", "overloaded", 2)]
