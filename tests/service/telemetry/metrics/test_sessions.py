"""What is told of sessions, their store and their tenants."""

from __future__ import annotations

import asyncio

import pytest

from nsm_core.errors import NotFound, StoreUnavailable
from service.stores.instrumented import instrumented
from service.stores.sessions.base import NewSession, StoreRoom
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.usage_metrics import measuring_usage
from service.telemetry.metrics.metrics import Metrics
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.triton_servers import eventually


async def test_calls_to_the_store_are_measured_with_their_bytes() -> None:
    async with gateway(FakeBackend(), snapshot_tokens=0, state_cache_mb=0) as server:  # each turn stores and loads
        await server.client.post("/v1/sessions", json={"id": "s1"})
        for _ in range(2):
            await server.client.post("/v1/sessions/s1/generate", json={"input": "x", "max_tokens": 3})
        await server.client.get("/v1/sessions/none")

        def calls(operation: str, outcome: str) -> float:
            return server.metric("nsm_store_operation_seconds_count", operation=operation, outcome=outcome)

        assert calls("create", "ok") == 1
        assert calls("acquire", "ok") == calls("commit", "ok") == 2
        assert calls("get", "refused") == 1
        written = server.metric("nsm_store_bytes_total", direction="written")
        assert written > server.metric("nsm_state_bytes_sum") > 0
        assert server.metric("nsm_store_bytes_total", direction="read") == pytest.approx(written / 2, rel=0.5)
        assert server.metric("nsm_lease_wait_seconds_count") == 2
        assert server.metric("nsm_lease_busy_total") == 0


async def test_busy_session_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteSessionStore(None)
    async with gateway(FakeBackend(), store=store) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        await store.acquire(SessionKey("default", "s1"), holder="another", lease_s=10.0)
        answer = await server.client.post("/v1/sessions/s1/generate", json={"input": "x"})
        assert answer.status_code == 409
        assert server.metric("nsm_lease_busy_total") == server.metric("nsm_lease_wait_seconds_count") == 1
        assert server.metric("nsm_store_operation_seconds_count", operation="acquire", outcome="refused") == 1


async def test_store_outcome_is_failed_when_unreachable_and_refused_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, store = Metrics(FakeBackend()), SqliteSessionStore(None)
    seen = instrumented(store, metrics.sessions)

    async def away(key: SessionKey) -> None:
        raise StoreUnavailable("away")

    with pytest.raises(NotFound):
        await seen.get(SessionKey("t", "s"))
    monkeypatch.setattr(store, "get", away)
    with pytest.raises(StoreUnavailable):
        await seen.get(SessionKey("t", "s"))
    name = "nsm_store_operation_seconds_count"
    for outcome in ("refused", "failed"):
        assert metrics.registry.get_sample_value(name, {"operation": "get", "outcome": outcome}) == 1


class RoomyStore(SqliteSessionStore):
    async def room(self) -> StoreRoom | None:
        return StoreRoom(kind="sqlite", num_free=25, num_bytes=100)


async def test_X20_the_room_of_a_store_is_a_metric_and_absent_where_nothing_bounds_it() -> None:
    bounded, free = Metrics(FakeBackend()), Metrics(FakeBackend())

    def room(metrics: Metrics, part: str) -> float | None:
        return metrics.registry.get_sample_value(f"nsm_store_{part}_bytes", {"store": "sqlite"})

    async def is_known() -> bool:
        return room(bounded, "limit") == 100

    async with measuring_usage(RoomyStore(None), bounded.sessions, tuple, interval_s=0.001):
        await eventually(is_known)
    assert room(bounded, "free") == 25
    async with measuring_usage(SqliteSessionStore(None), free.sessions, tuple, interval_s=0.001):
        await asyncio.sleep(0)
    assert room(free, "limit") is None


async def test_stored_bytes_are_shown_for_declared_tenants_only() -> None:
    metrics, store = Metrics(FakeBackend()), SqliteSessionStore(None)
    for tenant in ("a", "b"):
        await store.create(NewSession(key=SessionKey(tenant, "s"), model_fingerprint="m", metadata={}))
    tenants = ["a", "b"]

    def value_of(name: str, tenant: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"tenant": tenant})

    async def knows_b() -> bool:
        return value_of("nsm_tenant_sessions", "b") == 1

    async def knows_b_no_more() -> bool:
        return value_of("nsm_tenant_sessions", "b") is None

    async with measuring_usage(store, metrics.sessions, lambda: tenants, interval_s=0.001):
        await eventually(knows_b)
        assert value_of("nsm_tenant_stored_bytes", "a") == 0
        tenants.remove("b")
        await eventually(knows_b_no_more)
        assert value_of("nsm_tenant_sessions", "a") == 1
