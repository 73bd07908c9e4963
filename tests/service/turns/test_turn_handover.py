"""Turns that outlast the grace time of a server that stops: what another process can go on with is left to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsm_core.errors import ServerStopping, TurnCancelled
from service.stores.sessions.sqlite import SqliteSessionStore
from service.turns.codec import decode_tokens
from service.turns.turn import HandedOver, Turn, TurnOutcome, stopping
from tests.service.turns.test_turn_takeover import (
    KEY,
    RETRY,
    Process,
    collect,
    record_of,
    text_of,
    unbroken,
    written,
)
from tests.service.turns.test_turn_takeover import processes as processes
from tests.service.turns.test_turn_takeover import store as store

STREAMED: dict[str, Any] = {"is_resumable": True}


@pytest.mark.parametrize("how", [STREAMED, RETRY], ids=["streamed", "with_a_key"])
async def test_P3_S6_a_turn_in_mid_stream_is_handed_over_and_read_on_without_a_break(
    store: SqliteSessionStore, processes: tuple[Process, Process], how: dict[str, Any]
) -> None:
    one, two = processes
    opened = await one.open(5, 6, **how)
    one.backend.release(3)
    events = opened.events()
    seen = [await anext(events) for _ in range(3)]
    await one.stop()
    end = [event async for event in events][-1]
    assert isinstance(end, TurnOutcome)
    assert isinstance(end.error, HandedOver)
    record = await record_of(store)
    assert (record.status, record.lease_left_s) == ("running", 0.0)  # free at once, not after a lease's time
    stored = [token for chunk in record.chunks for token in decode_tokens(chunk)]
    assert len(stored) >= len(seen)  # no token that a client has is left to be drawn again
    tokens, end = await collect(await two.follow())
    expected = await unbroken(5, 6)
    assert (tokens, text_of(tokens, end), end.error) == (expected[0], text_of(*expected), None)
    assert tokens[: len(seen)] == seen
    assert two.backend.requests[0].sampled_ids == tuple(token.token_id for token in stored)
    assert (await store.get(KEY)).version == 1
    assert (one.count("nsm_turn_handover_total"), two.count("nsm_turn_takeover_total")) == (1, 1)


async def test_a_reader_elsewhere_sees_the_handover_as_a_pause(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await one.open(5, **STREAMED)
    reading = asyncio.create_task(collect(await two.follow()))
    await written(store, one, 2)
    await one.stop()
    tokens, end = await reading
    assert (tokens, end.head.version) == ((await unbroken(5))[0], 1)


async def test_D9_a_retry_after_the_handover_gets_the_turn_of_its_first_try(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await one.open(5, **RETRY)
    await written(store, one, 2)
    await one.stop()
    source = await two.open(5, **RETRY, request_id="r2")
    assert source.turn_id == "r1"
    assert (await collect(source))[1].head.version == 1


async def test_a_turn_whose_client_cannot_come_back_ends_with_nothing_kept(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    """Its client will ask anew: the turn must not be done a second time beside that."""
    one, two = processes
    opened = await one.open(5)
    await written(store, one, 2)
    await one.stop()
    error = (await collect(opened))[1].error
    assert (type(error), str(error)) == (ServerStopping, str(stopping()))
    assert (await record_of(store)).status == "failed"
    assert (await collect(await two.open(5, request_id="r2")))[1].head.version == 1
    assert one.count("nsm_turn_handover_total") == 0


async def test_a_turn_that_ends_within_the_grace_time_is_committed_here(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, _ = processes
    opened = await one.open(5, **STREAMED)
    stopping_it = asyncio.create_task(one.stop(grace_s=30.0))
    await one.backend.held.wait()
    one.backend.release_all()
    await stopping_it
    assert (await collect(opened))[1].head.version == 1
    assert (await record_of(store)).status == "committed"


async def test_a_handed_over_turn_that_was_taken_over_may_be_handed_over_again(store: SqliteSessionStore) -> None:
    one, two, three = Process(store, hold=True), Process(store, hold=True), Process(store)
    await one.open(5, **STREAMED)
    await written(store, one, 2)
    await one.stop()
    reading = asyncio.create_task(collect(await two.follow()))
    await written(store, two, 3)
    await two.stop()
    assert isinstance((await reading)[1].error, HandedOver)
    tokens, end = await collect(await three.follow())
    assert (tokens, end.head.version) == ((await unbroken(5))[0], 1)
    assert len(three.backend.requests[0].sampled_ids) >= 3
    await three.turns.drain(1.0)


async def test_a_reader_of_another_processs_turn_is_told_to_come_back_elsewhere(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    opened = await one.open(5, **STREAMED)
    reading = asyncio.create_task(collect(await two.follow()))
    await written(store, one, 2)
    await two.stop()
    with pytest.raises(HandedOver):
        await reading
    one.backend.release_all()
    assert (await collect(opened))[1].head.version == 1  # it never was its turn


async def test_a_process_that_stops_takes_nothing_over(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await one.open(5, **STREAMED)
    await written(store, one, 2)
    await one.stop()
    await two.stop()
    with pytest.raises(HandedOver):
        await collect(await two.follow())
    assert (await record_of(store)).status == "running"


async def test_S8_a_cancel_of_a_turn_that_was_handed_over_ends_it(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    opened = await one.open(5, **STREAMED)
    await written(store, one, 2)
    await one.stop()
    assert await two.turns.cancel(KEY)
    with pytest.raises(TurnCancelled, match="was cancelled"):
        await collect(await two.follow())
    assert isinstance(opened, Turn)
    assert two.backend.requests == []
