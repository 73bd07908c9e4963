from __future__ import annotations

import asyncio

import pytest

from nsm_core.errors import StoreUnavailable
from service.stores.expiry import removing_expired
from service.stores.sessions.sqlite import SqliteSessionStore


class Store(SqliteSessionStore):
    def __init__(self) -> None:
        super().__init__(None)
        self.num_sweeps = 0
        self.swept = asyncio.Event()

    async def remove_expired(self) -> int:
        self.num_sweeps += 1
        if self.num_sweeps == 1:
            raise StoreUnavailable("away")
        self.swept.set()
        return await super().remove_expired()


async def test_what_expired_is_removed_now_and_then_and_an_error_is_not_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    async with removing_expired(store, interval_s=0.001):
        await store.swept.wait()
    assert "were not removed: away" in caplog.text
    num_sweeps = store.num_sweeps
    await asyncio.sleep(0.005)
    assert store.num_sweeps == num_sweeps
