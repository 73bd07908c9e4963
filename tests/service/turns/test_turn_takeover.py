"""Turns whose process is lost, followed and taken over by another one: two processes' `TurnRegistry` over one store."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from nsm_core.engine.request import FinishReason, TokenEvent
from nsm_core.errors import (
    EngineDead,
    InvalidRequest,
    KeyReused,
    LeaseLost,
    NotFound,
    NsmError,
    Overloaded,
    StateMismatch,
    StoreUnavailable,
    TurnCancelled,
    VersionConflict,
)
from nsm_core.state.snapshot import Snapshot
from service.lifecycle.lifecycle import Lifecycle
from service.state.resume import TurnRequest
from service.stores.sessions.base import NewSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sessions.turn_records import TurnRecord
from service.telemetry.metrics.metrics import Metrics
from service.tenants.tenants import Tenants
from service.turns.codec import decode_tokens
from service.turns.turn import Turn, TurnOutcome, TurnSource
from service.turns.turns import TurnRegistry
from tests.support.fakes import FakeBackend, state_after
from tests.support.redis_servers import wait_until
from tests.support.stored_rows import expire_lease
from tests.support.turns import make_request

KEY = SessionKey("default", "s1")
RETRY: dict[str, Any] = {"identity": "key:k", "digest": "d"}


class Wire:
    """A process's way to the store, which can be cut."""

    def __init__(self, store: SqliteSessionStore) -> None:
        self.snapshot_writes = store.snapshot_writes
        self.max_uncounted_request = store.max_uncounted_request
        self.is_cut = False
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **fields: Any) -> Any:
            if self.is_cut:
                raise StoreUnavailable("cut off")
            return await getattr(self._store, name)(*args, **fields)

        return call


class Process:
    """A gateway's turns with an engine of its own."""

    def __init__(self, store: SqliteSessionStore, *, hold: bool = False, **backend: Any) -> None:
        self.backend = FakeBackend(hold=hold, **backend)
        self.metrics = Metrics(self.backend)
        self.wire: Any = Wire(store)
        self.turns = TurnRegistry(
            self.backend,
            self.wire,
            metrics=self.metrics,
            lifecycle=Lifecycle(),
            detached_s=60.0,
            lease_s=30.0,
            tenants=Tenants(None, self.wire, self.metrics),
        )
        self._store = store

    async def open(self, *input_ids: int, **changes: Any) -> TurnSource:
        return await self.turns.open_or_join(self.request(*input_ids, **changes))

    def request(self, *input_ids: int, max_tokens: int = 8, **changes: Any) -> TurnRequest:
        return make_request(*input_ids, max_tokens=max_tokens, **changes)

    async def follow(self, turn_id: str = "r1") -> TurnSource:
        return await self.turns.follow(KEY, turn_id=turn_id)

    async def lose(self) -> None:
        """It dies without a word to the store, and its lease runs out."""
        await asyncio.sleep(0)  # a task that never ran has no end
        self.wire.is_cut = True
        for task in tuple(self.turns._tasks):
            task.cancel()
        await self.turns.drain(0.0)
        await expire_lease(self._store)

    async def stop(self, grace_s: float = 0.0) -> None:
        """It is told to stop, and does so in good order."""
        await self.turns.drain(grace_s)
        self.turns.stop_following()

    def count(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)


@pytest.fixture
async def store() -> SqliteSessionStore:
    store = SqliteSessionStore(None)
    await store.create(NewSession(key=KEY, model_fingerprint="fake-fingerprint", metadata={}))
    return store


@pytest.fixture
async def processes(store: SqliteSessionStore) -> AsyncIterator[tuple[Process, Process]]:
    """The first holds its tokens back until they are released."""
    pair = Process(store, hold=True), Process(store)
    yield pair
    for process in pair:
        process.backend.release_all()
        await process.turns.drain(5.0)


async def record_of(store: SqliteSessionStore, turn_id: str = "r1") -> TurnRecord:
    record = await store.get_turn(KEY, turn_id=turn_id)
    assert record is not None
    return record


async def written(store: SqliteSessionStore, process: Process, num_tokens: int) -> None:
    """Lets so many tokens pass, and waits until they are in the record."""
    process.backend.release(num_tokens)
    while True:
        chunks = (await record_of(store)).chunks
        if sum(len(decode_tokens(chunk)) for chunk in chunks) >= num_tokens:
            return
        await asyncio.sleep(0.005)


async def abandon(store: SqliteSessionStore, process: Process, *prompt: int, after: int, **how: Any) -> None:
    """A turn of `process`, which is lost `after` so many written tokens."""
    await process.open(*prompt, **how)
    await written(store, process, after)
    await process.lose()


async def collect(source: TurnSource) -> tuple[list[TokenEvent], TurnOutcome]:
    events = [event async for event in source.events()]
    end = events[-1]
    assert isinstance(end, TurnOutcome)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [token.index for token in tokens] == list(range(1, len(tokens) + 1))
    finished = dataclasses.replace(end.finished, end_state=None)  # nobody keeps it for readers
    return tokens, dataclasses.replace(end, finished=finished)


def text_of(tokens: list[TokenEvent], end: TurnOutcome) -> str:
    return "".join(token.text for token in tokens) + end.finished.text


async def unbroken(*input_ids: int, **changes: Any) -> tuple[list[TokenEvent], TurnOutcome]:
    store = SqliteSessionStore(None)
    await store.create(NewSession(key=KEY, model_fingerprint="fake-fingerprint", metadata={}))
    return await collect(await Process(store).open(*input_ids, **changes))


async def test_R14_a_turn_of_a_lost_process_goes_on_for_whoever_reads_on(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await abandon(store, one, 5, 6, after=3)
    tokens, end = await collect(await two.follow())
    assert (tokens, text_of(tokens, end)) == ((await unbroken(5, 6))[0], text_of(*await unbroken(5, 6)))
    assert two.backend.requests[0].sampled_ids == two.backend.script_ids[:3]
    assert (end.error, end.head.version, end.finished.completion_tokens) == (None, 1, 8)
    log = await store.read_log(KEY)
    assert log == (0, 5, 6, *two.backend.script_ids[:8])
    assert (await store.load(KEY)).head == end.head
    assert two.count("nsm_turn_takeover_total") == 1
    again, end_again = await collect(await two.follow())
    assert (again, end_again) == (tokens, end)


@pytest.mark.parametrize("num_written", [0, 1, 7, 8])
async def test_a_turn_may_be_lost_anywhere(
    store: SqliteSessionStore, processes: tuple[Process, Process], num_written: int
) -> None:
    one, two = processes
    await one.open(5, max_tokens=9)
    if num_written:
        await written(store, one, num_written)
    await one.lose()
    tokens, end = await collect(await two.follow())
    assert (tokens, end.finished) == ((await unbroken(5, max_tokens=9))[0], end.finished)
    assert end.finished.reason is FinishReason.LENGTH
    assert await store.read_log(KEY) == (0, 5, *two.backend.script_ids[:9])


async def test_a_retry_that_takes_a_turn_over_has_its_own_deadline(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    """The turn's processes may have been lost again and again: its first deadline is none of this client's."""
    one, two = processes
    first, own = time.monotonic() + 1.0, time.monotonic() + 500.0
    await abandon(store, one, 5, after=1, deadline=first, **RETRY)
    tokens, end = await collect(await two.open(5, request_id="r2", deadline=own, **RETRY))
    assert two.backend.requests[0].deadline == own
    assert (len(tokens), end.error) == (8, None)


async def test_a_reader_sees_the_break_as_a_pause(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await one.open(5)
    await written(store, one, 2)
    source = await two.follow()
    assert source.is_replay
    reading = asyncio.create_task(collect(source))
    await written(store, one, 2)
    await one.lose()
    tokens, end = await reading
    assert (tokens, end.head.version) == ((await unbroken(5))[0], 1)


async def test_a_reader_follows_a_turn_of_another_process_to_its_end(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    opened = await one.open(5, 6)
    reading = asyncio.create_task(collect(await two.follow()))
    await written(store, one, 2)
    one.backend.release_all()
    assert await collect(opened) == await reading
    assert two.backend.requests == []


async def test_D9_a_retry_takes_over_what_its_first_try_began(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=3, **RETRY)
    source = await two.open(5, **RETRY, request_id="r2")
    assert (source.turn_id, source.is_replay) == ("r1", True)
    assert (await collect(source))[1].head.version == 1
    assert two.backend.requests[0].sampled_ids == two.backend.script_ids[:3]


async def test_D9_a_retry_elsewhere_follows_the_running_turn(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    opened = await one.open(5, **RETRY)
    retries = [asyncio.create_task(collect(await two.open(5, **RETRY, request_id=f"r{n}"))) for n in range(2, 6)]
    with pytest.raises(KeyReused):
        await two.open(5, **{**RETRY, "digest": "other"}, request_id="r9")
    one.backend.release_all()
    first = await collect(opened)
    assert [await retry for retry in retries] == [first] * 4
    assert (await store.get(KEY)).version == 1


async def test_whoever_is_faster_takes_over_and_the_others_follow(store: SqliteSessionStore) -> None:
    one, others = Process(store, hold=True), [Process(store) for _ in range(3)]
    await one.open(5)
    await written(store, one, 3)
    sources = [await other.follow() for other in others]
    await one.lose()
    results = await asyncio.gather(*(collect(source) for source in sources))
    assert [tokens for tokens, _ in results] == [(await unbroken(5))[0]] * 3
    assert {end.head.version for _, end in results} == {1}
    assert sum(len(other.backend.requests) for other in others) == 1
    for other in others:
        await other.turns.drain(1.0)


async def test_D8_a_holder_that_was_merely_stopped_keeps_nothing(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    opened = await one.open(5)
    await written(store, one, 3)
    await expire_lease(store)  # it slept
    tokens, end = await collect(await two.follow())
    one.backend.release_all()
    late = (await collect(opened))[1]
    assert isinstance(late.error, LeaseLost)
    assert "another server, which has committed it; GET /v1/streams/r1 gives the rest" in str(late.error)
    assert (await store.get(KEY)) == end.head
    assert tokens == (await unbroken(5))[0]


async def test_a_holder_that_wakes_while_another_goes_on_says_so(store: SqliteSessionStore) -> None:
    one, two = Process(store, hold=True), Process(store, hold=True)
    opened = await one.open(5)
    await written(store, one, 3)
    await expire_lease(store)  # it slept
    reading = asyncio.create_task(collect(await two.follow()))
    await two.backend.held.wait()
    one.backend.release_all()
    late = (await collect(opened))[1]
    assert "another server, which continues it; GET /v1/streams/r1 gives the rest" in str(late.error)
    two.backend.release_all()
    assert (await reading)[1].head.version == 1
    for process in (one, two):
        await process.turns.drain(1.0)


async def test_a_turn_that_nobody_comes_back_for_is_overwritten_by_the_next(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=3)
    end = (await collect(await two.open(7, request_id="r2")))[1]
    assert (end.head.version, two.backend.requests[0].prompt_ids) == (1, (0, 7))
    with pytest.raises(TurnCancelled, match="lost with the server"):
        await collect(await two.follow())


async def test_a_turn_goes_on_from_its_sessions_state(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await collect(await two.open(5, request_id="r0", seed=9))
    await abandon(store, one, 6, after=2)
    end = (await collect(await two.follow()))[1]
    assert (end.head.version, two.backend.requests[-1].sampling.seed) == (2, 9)
    log = await store.read_log(KEY)
    stored = await store.load(KEY)
    assert stored.snapshot is not None
    assert Snapshot.decode(stored.snapshot).state == state_after(log[:-1])


async def test_another_models_turn_is_left_for_a_process_that_can(store: SqliteSessionStore) -> None:
    one, other, right = Process(store, hold=True), Process(store, fingerprint="newer"), Process(store)
    await abandon(store, one, 5, after=2)
    with pytest.raises(StateMismatch, match="begun by model"):
        await collect(await other.follow())
    assert (await collect(await right.follow()))[1].head.version == 1
    for process in (other, right):
        await process.turns.drain(1.0)


@pytest.mark.parametrize("how", [{}, {"is_resumable": True}, {"identity": "key:other", "digest": "d"}])
@pytest.mark.parametrize("refusal", [Overloaded("full"), EngineDead("it has ended"), InvalidRequest("too long")])
async def test_R3_an_abandoned_turn_outlives_a_request_that_is_refused(
    store: SqliteSessionStore, processes: tuple[Process, Process], how: dict[str, Any], refusal: NsmError
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=3, **RETRY)
    two.backend.refusal = refusal
    with pytest.raises(type(refusal)):
        await two.open(6, request_id="r2", **how)
    two.backend.refusal = None
    with pytest.raises(VersionConflict):
        await two.open(6, request_id="r3", expected_version=4, **how)
    assert await store.get_turn(KEY, turn_id="r2") is None
    tokens, end = await collect(await two.open(5, request_id="r4", **RETRY))
    assert (tokens, end.head.version) == ((await unbroken(5))[0], 1)
    assert two.backend.requests[0].sampled_ids == two.backend.script_ids[:3]
    assert await store.read_log(KEY) == (0, 5, *two.backend.script_ids[:8])


async def test_R3_an_abandoned_turn_outlives_a_turn_that_its_engine_fails_before_the_first_token(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=3, **RETRY)
    two.backend.fail_after = 0
    assert (await collect(await two.open(6, request_id="r2")))[1].error is not None
    two.backend.fail_after = None
    assert await store.get_turn(KEY, turn_id="r2") is None
    assert (await collect(await two.open(5, request_id="r3", **RETRY)))[1].head.version == 1
    assert two.backend.requests[-1].sampled_ids == two.backend.script_ids[:3]


@pytest.mark.parametrize("how", [{}, {"is_resumable": True}])
async def test_an_abandoned_turn_ends_when_another_one_is_answered(
    store: SqliteSessionStore, processes: tuple[Process, Process], how: dict[str, Any]
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=3, **RETRY)
    two.backend.hold_on()
    opened = await two.open(6, request_id="r2", **how)
    assert (await store.get_turn(KEY, turn_id="r2") is not None) is bool(how)  # whoever knows its id may read on
    two.backend.release_all()
    assert (await collect(opened))[1].head.version == 1
    records = [await record_of(store, turn_id) for turn_id in ("r1", "r2")]
    assert [record.status for record in records] == ["failed", "committed"]
    assert await store.read_log(KEY) == (0, 6, *two.backend.script_ids[:8])


async def test_an_abandoned_turn_ends_when_another_one_is_handed_over(store: SqliteSessionStore) -> None:
    one, two, three = Process(store, hold=True), Process(store, hold=True), Process(store)
    await abandon(store, one, 5, after=3, **RETRY)
    await two.open(6, request_id="r2", identity="key:other", digest="d")
    await two.stop()
    assert [(await record_of(store, name)).status for name in ("r1", "r2")] == ["failed", "running"]
    assert (await collect(await three.follow("r2")))[1].head.version == 1
    await three.turns.drain(1.0)


async def test_S8_a_cancel_reaches_a_turn_of_another_process(
    store: SqliteSessionStore, processes: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.turns.token_writer.QUIET_S", 0.01)
    one, two = processes
    opened = await one.open(5, **RETRY)
    assert await two.turns.cancel(KEY)
    end = (await collect(opened))[1]
    assert isinstance(end.error, TurnCancelled)
    assert (await record_of(store)).status == "cancelled"
    assert (await store.get(KEY)).version == 0
    with pytest.raises(TurnCancelled):
        raise (await collect(await two.follow()))[1].error or AssertionError("no error")
    one.backend.release_all()
    assert (await collect(await two.open(5, **RETRY, request_id="r2")))[1].head.version == 1


async def test_a_cancelled_turn_of_a_lost_process_is_not_taken_over(
    store: SqliteSessionStore, processes: tuple[Process, Process]
) -> None:
    one, two = processes
    await abandon(store, one, 5, after=2)
    assert await two.turns.cancel(KEY)
    with pytest.raises(TurnCancelled, match="was cancelled"):
        await collect(await two.follow())
    assert two.backend.requests == []


async def test_a_turn_that_failed_tells_its_readers_why(store: SqliteSessionStore) -> None:
    process = Process(store, fail_after=2, error=NsmError("out of luck"))
    end = (await collect(await process.open(5)))[1]
    tokens, again = await collect(await process.follow())
    assert (len(tokens), str(again.error), str(end.error)) == (2, "out of luck", "out of luck")
    assert (await record_of(store)).status == "failed"


async def test_a_store_that_is_away_for_a_moment_leaves_no_gap_in_the_record(
    store: SqliteSessionStore, processes: tuple[Process, Process], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = processes
    opened = await one.open(5)
    await written(store, one, 2)
    one.wire.is_cut = True
    one.backend.release(2)
    await asyncio.to_thread(wait_until, lambda: "are not written down" in caplog.text, "the warning")
    one.wire.is_cut = False
    await written(store, one, 2)
    await one.lose()
    assert (await collect(await two.follow()))[0] == (await unbroken(5))[0]
    assert isinstance(opened, Turn)


async def test_a_reader_of_what_is_not_kept_is_told(processes: tuple[Process, Process]) -> None:
    for turn_id in ("r1", ""):
        with pytest.raises(NotFound) as caught:
            await processes[0].follow(turn_id)
        assert caught.value.code == "stream_not_found"


async def test_a_turn_goes_on_while_anybody_reads_it(store: SqliteSessionStore) -> None:
    process = Process(store, hold=True)
    process.turns._detached_s = 0.01
    opened = await process.open(5)
    follower = await process.follow()
    opened.detach()
    opened.detach()
    await asyncio.sleep(0.03)
    assert isinstance(opened, Turn)
    assert not opened.ended.is_set()
    follower.detach()
    await opened.ended.wait()
    assert isinstance(opened.end and opened.end.error, TurnCancelled)
    await process.turns.drain(1.0)
