"""A store, an engine and the turns over both, for tests of one process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from nsm_core.engine.request import TokenEvent
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.snapshot import Snapshot
from service.lifecycle.lifecycle import Lifecycle
from service.state.keeper import SnapshotPolicy, StateKeeper
from service.state.resume import TurnRequest
from service.stores.sessions.base import Commit, Lease, NewSession, SessionHead
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics
from service.tenants.tenants import Tenants
from service.turns.turn import Turn, TurnOutcome
from service.turns.turns import TurnRegistry
from tests.support.fakes import FakeBackend

KEY = SessionKey("default", "s1")


EOT = 0


class FaultyStore(SqliteSessionStore):
    """A store in memory whose commits can be held or made to fail."""

    def __init__(self) -> None:
        super().__init__(None)
        self.commit_error: Exception | None = None
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.is_committing = asyncio.Event()

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        self.is_committing.set()
        await self.may_commit.wait()
        if self.commit_error is not None:
            raise self.commit_error
        return await super().commit(lease, commit)


class TurnHarness:
    """A store with one empty session, a fake backend and the turns over both."""

    def __init__(self, backend: FakeBackend, *, detached_s: float = 60.0, policy: SnapshotPolicy | None = None) -> None:
        """`policy`: None for a snapshot with each turn, and no states in memory."""
        self.backend = backend
        self.store = FaultyStore()
        self.policy = policy
        self.now_s = 0.0  # of the states in memory
        self.metrics = Metrics(backend)
        self.lifecycle = Lifecycle()
        self.turns = self.make_turns(backend, detached_s=detached_s)

    def make_turns(self, backend: FakeBackend, *, detached_s: float = 60.0, lease_s: float = 30.0) -> TurnRegistry:
        return TurnRegistry(
            backend,
            self.store,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            detached_s=detached_s,
            lease_s=lease_s,
            tenants=Tenants(None, self.store, self.metrics),
            keeper=StateKeeper(backend, self.store, self.metrics, policy=self.policy, clock=lambda: self.now_s),
            clock=lambda: 5.0,
        )

    async def create(self, session_id: str = "s1") -> SessionHead:
        return await self.store.create(
            NewSession(key=SessionKey("default", session_id), model_fingerprint="fake-fingerprint", metadata={})
        )

    async def open(self, *input_ids: int, **changes: Any) -> Turn:
        return await self.turns.open_turn(make_request(*input_ids, **changes))

    async def say(self, *input_ids: int, **changes: Any) -> TurnOutcome:
        return (await collect(await self.open(*input_ids, **changes)))[1]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def snapshot(self, session_id: str = "s1") -> Snapshot:
        stored = await self.store.load(SessionKey("default", session_id))
        assert stored.snapshot is not None
        return Snapshot.decode(stored.snapshot)


def make_request(*input_ids: int, max_tokens: int = 4, seed: int | None = None, **changes: Any) -> TurnRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=77 if seed is None else seed)
    fields: dict[str, Any] = {
        "request_id": "r1",
        "key": SessionKey("default", "s1"),
        "input_ids": input_ids,
        "is_verbatim": False,
        "sampling": sampling,
        "has_own_seed": seed is not None,
        "arrival": time.monotonic(),
    }
    return TurnRequest(**{**fields, **changes})


async def collect(turn: Turn) -> tuple[list[TokenEvent], TurnOutcome]:
    events = [event async for event in turn.events()]
    end = events.pop()
    assert isinstance(end, TurnOutcome)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == len(events)
    return tokens, end


@contextlib.asynccontextmanager
async def make_harness(backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[TurnHarness]:
    """Nothing may still run, and no task may be left, when a test ends."""
    harness = TurnHarness(backend or FakeBackend(), **settings)
    await harness.create()
    tasks_before = asyncio.all_tasks()
    yield harness
    harness.backend.release_all()
    await harness.turns.drain(grace_s=5.0)
    assert harness.turns.num_running == 0
    assert not harness.backend.running
    assert asyncio.all_tasks() == tasks_before
