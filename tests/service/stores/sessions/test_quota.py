from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from nsm_core.errors import QuotaExceeded
from service.stores.sessions.base import LogMark, NewSession, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.quota import QuotaStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.snapshots import make_snapshot


class Ledger:
    """Quotas that write down what was asked for."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.asked: list[tuple[str, int]] = []
        self.num_open = 0
        self.is_full = is_full

    @contextlib.asynccontextmanager
    async def new_session(self, tenant: str, *, num_bytes: int = 0) -> AsyncIterator[None]:
        self.asked.append((tenant, num_bytes))
        if self.is_full:
            raise QuotaExceeded("full")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


EMPTY = NewSession(key=SessionKey("a", "s1"), model_fingerprint="f", metadata={})
COPIED = dataclasses.replace(
    EMPTY,
    version=1,
    position=3,
    snapshot=make_snapshot(tenant="a", session_id="s1", version=1, position=3).encode(),
    log_ids=(1, 2, 3),
    marks=(LogMark(version=1, num_log_tokens=3, num_sampled=1, seed=7),),
)


def test_it_has_every_method_of_a_store() -> None:
    store = SqliteSessionStore(None)
    wrapped = QuotaStore(store, Ledger())
    names = [name for name, value in vars(SessionStore).items() if callable(value) and not name.startswith("_")]
    assert len(names) > 15
    for name in names:
        is_own = name == "create"
        assert (getattr(wrapped, name) == getattr(store, name)) is not is_own, name


async def test_a_creation_happens_inside_its_quota() -> None:
    store, ledger = SqliteSessionStore(None), Ledger()
    wrapped = QuotaStore(store, ledger)
    made = await wrapped.create(dataclasses.replace(EMPTY, ttl_s=60.0))
    assert (made.ttl_s, await store.get(SessionKey("a", "s1"))) == (60.0, made)
    await store.delete(SessionKey("a", "s1"))
    copy = await wrapped.create(COPIED)
    assert (await store.load(SessionKey("a", "s1"))).snapshot == COPIED.snapshot
    assert (copy.version, await store.read_log(SessionKey("a", "s1"))) == (1, (1, 2, 3))
    assert ledger.asked == [("a", 0), ("a", len(COPIED.snapshot or b"") + 12)]
    assert (await store.usage(tenant="a")).num_bytes == ledger.asked[1][1]
    assert ledger.num_open == 0


async def test_nothing_is_created_when_the_quota_refuses() -> None:
    store = SqliteSessionStore(None)
    wrapped = QuotaStore(store, Ledger(is_full=True))
    for attempt in (wrapped.create(EMPTY), wrapped.create(COPIED)):
        with pytest.raises(QuotaExceeded):
            await attempt
    assert (await store.list(tenant="a", limit=10)).heads == ()
