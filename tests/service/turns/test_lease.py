from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.errors import LeaseLost, NotFound, NsmError, SessionBusy, StoreUnavailable
from service.stores.sessions.base import Commit, Lease, LeasedSession, NewSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics
from service.turns.lease import RENEWALS_PER_LEASE, Leases
from tests.support.fakes import FakeBackend
from tests.support.snapshots import make_snapshot
from tests.support.stored_rows import lease_holder, steal_lease

KEY = SessionKey("default", "s1")
TURN = {"position": 1, "model_fingerprint": "m1", "new_ids": (1,), "num_sampled": 0, "seed": 0}


class Store(SqliteSessionStore):
    """Tells when a lease was renewed; renewals can be made to fail, and acquiring to wait. For its leases the time
    from one renewal to the next passes with each of them, and no other.
    """

    def __init__(self) -> None:
        super().__init__(None, clock=lambda: self.now_s)
        self.now_s = 1_000.0
        self.num_renewals = 0
        self.renewed = asyncio.Condition()
        self.renew_error: NsmError | None = None
        self.release_error: NsmError | None = None
        self.is_acquired = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def acquire(self, key: SessionKey, **options: Any) -> LeasedSession:
        leased = await super().acquire(key, **options)
        self.is_acquired.set()
        await self.may_answer.wait()
        return leased

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        async with self.renewed:
            self.num_renewals += 1
            self.now_s += lease_s / RENEWALS_PER_LEASE
            self.renewed.notify_all()
        if self.renew_error is not None:
            raise self.renew_error
        return await super().renew(lease, lease_s=lease_s)

    async def release(self, lease: Lease) -> None:
        if self.release_error is not None:
            raise self.release_error
        await super().release(lease)

    async def wait_renewals(self, number: int) -> None:
        async with self.renewed:
            await self.renewed.wait_for(lambda: self.num_renewals >= number)


class LeaseHarness:
    def __init__(self, *, lease_s: float) -> None:
        self.store = Store()
        self.metrics = Metrics(FakeBackend())
        self.leases = Leases(self.store, lease_s=lease_s, metrics=self.metrics)
        self.lost: list[NsmError] = []
        self.is_lost = asyncio.Event()

    def on_lost(self, error: NsmError) -> None:
        self.lost.append(error)
        self.is_lost.set()

    def num_lost(self) -> float | None:
        return self.metrics.registry.get_sample_value("nsm_lease_lost_total")


@contextlib.asynccontextmanager
async def make_harness(*, lease_s: float = 60.0) -> AsyncIterator[LeaseHarness]:
    """No task may be left when a test ends."""
    harness = LeaseHarness(lease_s=lease_s)
    await harness.store.create(NewSession(key=KEY, model_fingerprint="m1", metadata={}))
    tasks_before = asyncio.all_tasks()
    yield harness
    assert asyncio.all_tasks() == tasks_before


async def test_a_lease_is_renewed_until_it_is_given_back() -> None:
    async with make_harness(lease_s=0.03) as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        await harness.store.wait_renewals(RENEWALS_PER_LEASE + 1)  # the first lease is over
        with pytest.raises(SessionBusy):
            await harness.leases.take(KEY, on_lost=harness.on_lost)
        await held.give_back()
        await held.give_back()
        assert harness.lost == []
        await (await harness.leases.take(KEY, on_lost=harness.on_lost)).give_back()


async def test_a_lease_that_is_over_is_gone_at_once() -> None:
    """It holds the states of its turn, which are megabytes: they must not wait for the collector of cycles."""
    async with make_harness() as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        await asyncio.sleep(0)  # the renewal has begun to wait
        gc.disable()
        try:
            await held.give_back()
            gone = weakref.ref(held)
            del held
            assert gone() is None
        finally:
            gc.enable()


async def test_D8_a_lost_lease_is_told_once_and_renewed_no_more() -> None:
    async with make_harness(lease_s=0.03) as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        await steal_lease(harness.store, "thief")
        await harness.is_lost.wait()
        assert [type(error) for error in harness.lost] == [LeaseLost]
        await held.give_back()
        assert await lease_holder(harness.store) == "thief"
        assert harness.num_lost() == 1


async def test_a_store_that_is_away_for_a_moment_does_not_end_the_turn() -> None:
    async with make_harness(lease_s=0.03) as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        harness.store.renew_error = StoreUnavailable("away")
        await harness.store.wait_renewals(2)
        harness.store.renew_error = None
        await harness.store.wait_renewals(3)
        assert harness.lost == []
        head = await held.commit(Commit(expected_version=0, snapshot=make_snapshot().encode(), **TURN))
        assert head.version == 1


async def test_D8_a_commit_without_the_lease_changes_nothing() -> None:
    async with make_harness() as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        await steal_lease(harness.store, "thief")
        with pytest.raises(LeaseLost):
            await held.commit(Commit(expected_version=0, snapshot=make_snapshot().encode(), **TURN))
        await held.give_back()
        assert (await harness.store.get(KEY)).version == 0
        assert harness.num_lost() == 1


async def test_who_is_cancelled_while_taking_a_lease_leaves_none_behind() -> None:
    async with make_harness() as harness:
        harness.store.may_answer.clear()
        taking = asyncio.create_task(harness.leases.take(KEY, on_lost=harness.on_lost))
        await harness.store.is_acquired.wait()
        assert await lease_holder(harness.store) is not None
        taking.cancel()
        harness.store.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await (await harness.leases.take(KEY, on_lost=harness.on_lost)).give_back()


async def test_a_release_that_fails_is_no_error_of_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    async with make_harness() as harness:
        held = await harness.leases.take(KEY, on_lost=harness.on_lost)
        harness.store.release_error = StoreUnavailable("away")
        await held.give_back()
        assert "was not released: away" in caplog.text


async def test_holders_are_told_apart_and_name_their_process() -> None:
    async with make_harness() as harness:
        holders = []
        for _ in range(2):
            held = await harness.leases.take(KEY, on_lost=harness.on_lost)
            holders.append(str(await lease_holder(harness.store)).split("/"))
            await held.give_back()
        assert holders[0][0] == holders[1][0]
        assert holders[0][1] != holders[1][1]


async def test_an_unknown_session_has_no_lease() -> None:
    async with make_harness() as harness:
        with pytest.raises(NotFound):
            await harness.leases.take(SessionKey("default", "nobody"), on_lost=harness.on_lost)
