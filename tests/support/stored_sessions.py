"""Steps on a SessionStore that tests take again and again, and a clock that stands still between them."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import (
    Commit,
    KnownVersion,
    Lease,
    LeasedSession,
    NewSession,
    SessionHead,
    SessionStore,
)
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from tests.support.snapshots import make_snapshot

LEASE_S = 10.0
Store = TypeVar("Store", bound=SessionStore)


class Clock:
    """Seconds from 1000; each reading is a little later than the one before, and `advance` jumps."""

    def __init__(self) -> None:
        self._now = 1_000.0 - 2**-10

    def __call__(self) -> float:
        self._now += 2**-10
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def expires_in(head: SessionHead) -> float:
    """Seconds from the head's last change."""
    assert head.expires_at is not None
    return head.expires_at - head.updated_at


def without_expiry(head: SessionHead) -> SessionHead:
    """For clocks that move what is stored nearer to its end, because nobody can move a server's clock."""
    return dataclasses.replace(head, expires_at=None)


@contextlib.asynccontextmanager
async def opened(store: Store) -> AsyncIterator[Store]:
    """The store, until it is closed again."""
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def opened_redis(url: str) -> contextlib.AbstractAsyncContextManager[RedisSessionStore]:
    """The Redis store of a URL, until it is closed again."""
    return opened(RedisSessionStore(parse_redis_url(url)))


async def create(store: SessionStore, session_id: str = "s1", *, tenant: str = "a", **fields: Any) -> SessionHead:
    fields = {"model_fingerprint": "m1", "metadata": {"k": "v"}, **fields}
    return await store.create(NewSession(key=SessionKey(tenant, session_id), **fields))


async def acquire(
    store: SessionStore,
    session_id: str = "s1",
    *,
    tenant: str = "a",
    holder: str | None = None,
    known: KnownVersion | None = None,
) -> LeasedSession:
    holder = holder or uuid.uuid4().hex
    return await store.acquire(SessionKey(tenant, session_id), holder=holder, lease_s=LEASE_S, known=known)


async def commit_under(
    store: SessionStore,
    lease: Lease,
    head: SessionHead,
    *,
    snapshot: bytes | None = None,
    new_ids: tuple[int, ...] = (1, 2, 3),
    num_floats: int = 16,
    num_fed: int | None = None,
    is_log_alone: bool = False,
    **fields: Any,
) -> SessionHead:
    """Commits what follows `head`. `num_fed`: of the new tokens, None for all; `is_log_alone`: without a snapshot."""
    version = head.version + 1
    made = make_snapshot(session_id=head.session_id, version=version, num_floats=num_floats)
    origin = {"model_fingerprint": "m1", "tokenizer_fingerprint": "t1", "numerics": "cpu"}
    fields = {**origin, "num_sampled": 1, "seed": 7, **fields}
    return await store.commit(
        lease,
        Commit(
            expected_version=head.version,
            snapshot=None if is_log_alone else snapshot or made.encode(),
            position=head.position + (len(new_ids) if num_fed is None else num_fed),
            new_ids=new_ids,
            **fields,
        ),
    )


async def commit(store: SessionStore, head: SessionHead, **fields: Any) -> SessionHead:
    """A whole turn that follows `head`: takes the lease, commits; gives the lease back when that fails."""
    lease = fields.pop("lease", None) or (await acquire(store, head.session_id, tenant=head.tenant)).lease
    try:
        return await commit_under(store, lease, head, **fields)
    finally:
        await store.release(lease)


async def commit_log(store: SessionStore, head: SessionHead, **fields: Any) -> SessionHead:
    """A whole turn that stores no snapshot. `lease`: None to take it."""
    return await commit(store, head, is_log_alone=True, **fields)
