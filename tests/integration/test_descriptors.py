"""A store in a process that has no file descriptor left, since its clients hold them all."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from nsm_core.errors import StoreReplaced, StoreUnavailable
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.stored_sessions import commit, create


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing new can be opened inside; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_lack_of_descriptors_is_not_taken_for_a_replaced_store(tmp_path: Path) -> None:
    store = SqliteSessionStore(tmp_path / "sessions.db")
    await store.open()
    try:
        head = await commit(store, await create(store))
        refusals: list[StoreUnavailable] = []
        with no_descriptors():
            for _ in range(3):
                try:
                    head = await commit(store, head)
                except StoreUnavailable as error:
                    refusals.append(error)
        assert [error for error in refusals if isinstance(error, StoreReplaced)] == []
        head = await commit(store, head)
    finally:
        await store.close()
    again = SqliteSessionStore(tmp_path / "sessions.db")
    await again.open()
    assert await again.get(head.key) == head
    await again.close()
