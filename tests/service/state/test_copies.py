from __future__ import annotations

from typing import Any

import pytest

from nsm_core.errors import SessionBusy, SnapshotCorrupt
from service.state.copies import SessionCopy, create_copy, read_copy
from service.stores.sessions.base import LogMark, Rewind, StoredSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.snapshots import make_snapshot
from tests.support.stored_sessions import acquire, commit, create

KEY = SessionKey("a", "s1")


class RestlessStore(SqliteSessionStore):
    """Something happens to the session between its being loaded and its log being read."""

    def __init__(self, *, num_rewinds: int) -> None:
        super().__init__(None)
        self.num_rewinds = num_rewinds

    async def load(self, key: SessionKey) -> StoredSession:
        stored = await super().load(key)
        if self.num_rewinds:
            self.num_rewinds -= 1
            lease = (await acquire(self)).lease
            cut: dict[str, Any] = {"num_log_tokens": 1, "num_sampled": 0, "seed": 7, "position": 1}
            raw = make_snapshot(version=stored.head.version + 1).encode()
            await self.rewind(
                lease, Rewind(expected_version=stored.head.version, snapshot=raw, model_fingerprint="m1", **cut)
            )
            await commit(self, await self.get(KEY), new_ids=(9, 9, 9))
        return stored


async def test_a_copy_is_of_one_version_whatever_happens_meanwhile() -> None:
    store = RestlessStore(num_rewinds=2)
    await commit(store, await create(store))
    copy = await read_copy(store, KEY)
    assert (copy.head.version, copy.log_ids) == (5, (1, 9, 9, 9))
    assert copy.marks[-1] == LogMark(version=5, num_log_tokens=4, num_sampled=1, seed=7)
    assert copy.snapshot == make_snapshot(version=5).encode()


async def test_a_copy_gives_up_where_it_is_never_left_in_peace() -> None:
    store = RestlessStore(num_rewinds=1_000)
    await commit(store, await create(store))
    with pytest.raises(SessionBusy):
        await read_copy(store, KEY)


async def test_L6_a_state_that_is_not_the_sessions_own_is_not_copied() -> None:
    store = SqliteSessionStore(None)
    head = await commit(store, await create(store))
    somebody_elses = make_snapshot(session_id="s9", position=3).encode()
    copy = SessionCopy(head=head, snapshot=somebody_elses, log_ids=(1, 2, 3), marks=())
    with pytest.raises(SnapshotCorrupt, match="not its own"):
        await create_copy(store, copy, SessionKey("a", "s2"), metadata={}, ttl_s=None, forked_from=None)
