"""Whatever the store of prefixes does, requests are answered, and answered the same."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from nsm_core.errors import StoreUnavailable
from service.stores.prefixes.base import PrefixBounds, PrefixKey
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.writer import MAX_TENANT_PENDING, Breaker
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, gateway
from tests.support.tenants import StillClock

BOUNDS = PrefixBounds(max_bytes=2**20, ttl_s=60.0)


class Unreliable(MemoryPrefixStore):
    """`is_down`: every call fails. `gate`: writing waits for it."""

    def __init__(self) -> None:
        super().__init__(BOUNDS)
        self.is_down = False
        self.is_lame = False
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def find(self, *, tenant: str, family: str) -> tuple[PrefixKey, ...]:
        self._check()
        if self.is_lame:
            await asyncio.Event().wait()
        return await super().find(tenant=tenant, family=family)

    async def put(self, *, tenant: str, key: PrefixKey, entry: bytes) -> None:
        await self.gate.wait()
        self._check()
        await super().put(tenant=tenant, key=key, entry=entry)

    def _check(self) -> None:
        self.num_calls += 1
        if self.is_down:
            raise StoreUnavailable("the store is down")

    def damage(self) -> None:
        for held in self._tenants.values():
            for item in held.values():
                item.entry = item.entry[:-40] + bytes(40)


def ids(length: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + index) % 278 + 1 for index in range(length)]


async def ask(server: Gateway, prompt: list[int], *, drains: bool = True, **fields: Any) -> int:
    """The cached tokens of a good answer."""
    response = await server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    if drains:
        await server.services.prefix_resume.drain()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_store_that_is_down_is_a_miss_and_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        store.is_down = True
        for number in range(5):
            assert await ask(server, ids(100 + number)) == 0
        assert store.num_calls == 1
        assert server.metric("nsm_prefix_resume_total", outcome="unavailable") == 5
        assert server.metric("nsm_prefix_saved_total", outcome="stored") == 0
    assert caplog.text.count("stored prefixes are not used for 5 s: the store is down") == 1


async def test_writing_fails_beside_the_request() -> None:
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        store.gate.clear()
        assert await ask(server, ids(100), drains=False) == 0
        store.is_down = True
        store.gate.set()
        await server.services.prefix_resume.drain()
        assert server.metric("nsm_prefix_saved_total", outcome="failed") == 1


async def test_a_store_that_does_not_answer_costs_half_a_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.stores.prefixes.resume.LOOKUP_S", 0.01)
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        store.is_lame = True
        for _ in range(3):
            assert await ask(server, ids(100)) == 0
        assert store.num_calls == 1


async def test_an_answer_does_not_wait_for_the_store_and_the_next_prompt_does_not_either() -> None:
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        store.gate.clear()
        await ask(server, ids(100), drains=False)
        assert await ask(server, ids(110), drains=False) == 100
        assert await store.find(tenant="default", family="any") == ()
        store.gate.set()


async def test_too_many_states_at_once_are_dropped_and_counted() -> None:
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        store.gate.clear()
        for number in range(MAX_TENANT_PENDING + 2):
            await ask(server, ids(100, seed=number), drains=False)
        assert server.metric("nsm_prefix_saved_total", outcome="dropped") == 2
        store.gate.set()
        await server.services.prefix_resume.drain()
        assert server.metric("nsm_prefix_saved_total", outcome="stored") == MAX_TENANT_PENDING


async def test_a_damaged_entry_is_not_used_and_makes_room_for_a_new_one() -> None:
    store = Unreliable()
    async with gateway(FakeBackend(), prefixes=store) as server:
        await ask(server, ids(100))
        store.damage()
        assert await ask(server, ids(101)) == 0
        assert server.metric("nsm_prefix_resume_total", outcome="corrupt") == 1
        assert await ask(server, ids(102)) > 0


async def test_R1_short_prompts_are_left_alone() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        for _ in range(3):
            assert await ask(server, ids(20)) == 0
        assert server.metric("nsm_prefix_resume_total", outcome="short") == 3
    assert not any(request.keep_states_at or request.keep_state for request in backend.requests)


async def test_what_is_cheaper_to_read_again_than_to_keep_is_not_kept() -> None:
    backend = FakeBackend()
    async with gateway(backend, prefix_min_tokens=128) as server:
        assert await ask(server, ids(120)) == 0
        assert await ask(server, ids(140, seed=1)) == 0
        assert await ask(server, ids(140, seed=1)[:127] + ids(50, seed=2)) == 0
    assert [request.keep_states_at for request in backend.requests] == [(), (140,), (64,)]
    assert server.metric("nsm_prefix_saved_total", outcome="stored") == 2


async def test_an_answer_that_makes_a_prompt_long_enough_is_kept() -> None:
    async with gateway(FakeBackend("a" * 200), prefix_min_tokens=128) as server:
        await ask(server, ids(100), max_tokens=20)
        assert server.metric("nsm_prefix_saved_total", outcome="stored") == 0
        await ask(server, ids(100, seed=1), max_tokens=40)
        assert server.metric("nsm_prefix_saved_total", outcome="stored") == 1


async def test_short_beginnings_that_come_back_are_kept_whatever_a_new_prompt_must_spare() -> None:
    """A system prompt of 70 tokens is shared by prompts of 90, and a chat that was resumed goes on in short steps."""
    backend = FakeBackend()
    async with gateway(backend, prefix_min_tokens=1000) as server:
        found = [await ask(server, ids(70) + ids(20, seed=1 + number)) for number in range(4)]
        assert found == [0, 0, 64, 64]
        chat = ids(70) + ids(90, seed=9)
        assert await ask(server, chat) == 64
        assert await ask(server, chat + ids(70, seed=8)) == len(chat)


async def test_on_a_gpu_beginnings_are_kept_only_where_reading_takes_longer_than_a_copy_to_the_host() -> None:
    backend = FakeBackend()
    backend.model = dataclasses.replace(backend.model, numerics="cuda/bf16/some GPU")
    async with gateway(backend, prefix_min_tokens=128) as server:
        await ask(server, ids(140))
        await ask(server, ids(140))
        await ask(server, ids(1100, seed=1))
    assert [request.keep_states_at for request in backend.requests] == [(), (), (1100,)]
    assert [request.keep_state for request in backend.requests] == [False] * 3


async def test_R2_what_the_engine_resumes_is_the_state_after_exactly_these_ids() -> None:
    backend = FakeBackend()
    async with gateway(backend) as server:
        for length in (100, 180, 300, 301):
            await ask(server, ids(length))
    resumed = [request.resume for request in backend.requests if request.resume]
    assert [resume.position for resume in resumed] == [100, 180, 300]
    for resume in resumed:
        assert resume.state == state_after(tuple(ids(resume.position)))


async def test_an_answer_that_is_encoded_otherwise_is_not_kept() -> None:
    """A chat that goes on after the answer starts at its end, if its text has the ids that were sampled."""
    backend = FakeBackend("best of times, " * 40)
    async with gateway(backend) as server:
        said = [{"role": "user", "content": "It was the worst of times, " * 20}]
        for _ in range(2):
            body = {"messages": said, "max_tokens": 100}
            answer = (await server.client.post("/v1/chat/completions", json=body)).json()
            await server.services.prefix_resume.drain()
            said += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        first, second = backend.requests
        # the fake's answer begins without the blank that the template puts in front of it
        assert server.metric("nsm_prefix_saved_total", outcome="other_ids") >= 1
        assert second.resume is not None
        assert second.resume.position == len(first.prompt_ids)


def test_the_breaker_closes_again() -> None:
    clock = StillClock()
    breaker = Breaker(clock)
    assert not breaker.is_open
    breaker.failed(TimeoutError())
    assert breaker.is_open
    clock.now = 5.0
    assert not breaker.is_open
