from __future__ import annotations

import asyncio

import pytest

from nsm_core.errors import StorageFull
from service.routes import health
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway


async def test_ready_when_the_engine_turns_and_the_store_takes_writes() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        for path in ("/health", "/health/ready"):
            answer = await server.client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        backend.ready = False
        answer = await server.client.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json()["checks"] == {"engine": False, "store": True, "accepting": True}
        assert (await server.client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("fault", "reason"), [("full", "no room"), ("hangs", "the session store did not answer within 0.01 s")]
)
async def test_a_store_that_cannot_be_written_is_not_ready_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    async def check_writable() -> None:
        if fault == "hangs":
            await asyncio.Event().wait()
        error = StorageFull("no room")
        error.add_note("redis://10.0.0.1")
        raise error

    if fault == "hangs":
        monkeypatch.setattr(health, "STORE_PROBE_TIMEOUT_S", 0.01)
    async with gateway(FakeBackend()) as server:
        monkeypatch.setattr(server.services.store, "check_writable", check_writable)
        answer = await server.client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {"engine": True, "store": False, "accepting": True}
    assert answer.json()["reasons"] == {"store": reason}
    assert f"not ready: {reason}" in caplog.text
    assert ("redis://10.0.0.1" in caplog.text) == (fault == "full")


async def test_a_stopping_server_is_not_ready_and_takes_no_new_work() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        server.services.lifecycle.begin_drain()
        assert (await server.client.get("/health/ready")).json()["checks"]["accepting"] is False
        refused = await server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "server_stopping"
        assert (await server.client.get("/metrics")).status_code == 200
        assert (await server.client.get("/health/live")).status_code == 200
