from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nsm_core.errors import InvalidRequest, QuotaExceeded, RateLimited
from service.stores.sessions.base import TenantUsage
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics
from service.tenants.api_keys import KeyFile
from service.tenants.tenants import Tenants
from tests.support.fakes import FakeBackend
from tests.support.tenants import StillClock, make_key, write_keys

KEY = make_key("acme")


class TenantHarness:
    """Tenants of a file that may be written again, over a store whose usage the test says."""

    def __init__(self, path: Path, limits: str) -> None:
        self.path, self.clock, self.store = path, StillClock(), SqliteSessionStore(None)
        write_keys(path, KEY, acme=limits)
        metrics = Metrics(FakeBackend())
        self.tenants = Tenants(KeyFile(path, clock=self.clock), self.store, metrics, clock=self.clock)
        self.used = TenantUsage(num_sessions=0, num_bytes=0)
        self.store.usage = self._usage  # type: ignore[method-assign]

    async def _usage(self, *, tenant: str) -> TenantUsage:
        assert tenant == "acme"
        await asyncio.sleep(0)  # a real store lets others run here
        return self.used

    def change(self, limits: str) -> None:
        write_keys(self.path, KEY, acme=limits)
        self.clock.now += 1.0


def test_limits_change_while_requests_run(tmp_path: Path) -> None:
    harness = TenantHarness(tmp_path / "keys.toml", "max_concurrent = 3")
    tenants = harness.tenants
    permits = [tenants.enter("acme"), tenants.enter("acme", 2)]
    with pytest.raises(RateLimited, match="3 requests are running, 1 more"):
        tenants.enter("acme")
    harness.change("max_concurrent = 4")
    permits.append(tenants.enter("acme"))
    harness.change("max_concurrent = 2")
    with pytest.raises(RateLimited, match="is 2: 4 requests are running"):
        tenants.enter("acme")
    permits.pop(1).leave()
    with pytest.raises(RateLimited, match="is 2: 2 requests are running"):
        tenants.enter("acme")
    permits.pop().leave()
    permits.append(tenants.enter("acme"))
    with pytest.raises(InvalidRequest, match=r"at most 2 .*, got 3"):
        tenants.enter("acme", 3)
    harness.change("")
    permits.append(tenants.enter("acme", 3))


def test_a_tenant_without_limits_is_counted_for_the_time_it_gets_some(tmp_path: Path) -> None:
    harness = TenantHarness(tmp_path / "keys.toml", "")
    permits = [harness.tenants.enter("acme", 100) for _ in range(2)]
    assert harness.tenants.take("acme") is None
    harness.change("max_concurrent = 100\nrequests_per_s = 1")
    with pytest.raises(RateLimited, match="200 requests are running"):
        harness.tenants.enter("acme")
    allowance = harness.tenants.take("acme")
    assert allowance is not None
    assert (allowance.limit, allowance.remaining) == (1, 0)
    for permit in permits:
        permit.leave()
    harness.tenants.enter("acme", 100)


async def test_bytes_of_copies_made_at_once_are_counted_together(tmp_path: Path) -> None:
    harness = TenantHarness(tmp_path / "keys.toml", "max_stored_bytes = 100")
    harness.used = TenantUsage(num_sessions=7, num_bytes=40)
    go_on = asyncio.Event()

    async def copy() -> None:
        async with harness.tenants.new_session("acme", num_bytes=30):
            await go_on.wait()

    tasks = [asyncio.create_task(copy()) for _ in range(3)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    go_on.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    refusals = [error for error in ended if error is not None]
    assert refusals
    assert all(isinstance(error, QuotaExceeded) for error in refusals)
    assert "is 100, and 40 are stored" in str(refusals[0])
    assert len(ended) - len(refusals) <= 2
    async with harness.tenants.new_session("acme", num_bytes=60):  # nothing of the refused ones is left
        pass
    with pytest.raises(QuotaExceeded):
        async with harness.tenants.new_session("acme", num_bytes=61):
            pass


async def test_a_turn_may_begin_below_the_limit_only(tmp_path: Path) -> None:
    harness = TenantHarness(tmp_path / "keys.toml", "max_stored_bytes = 100")
    for num_bytes, is_refused in ((0, False), (99, False), (100, True), (101, True)):
        harness.used = TenantUsage(num_sessions=1, num_bytes=num_bytes)
        if is_refused:
            with pytest.raises(QuotaExceeded):
                await harness.tenants.check_stored_bytes("acme")
        else:
            await harness.tenants.check_stored_bytes("acme")
