"""A gateway's side of links: several on one server, and calls that a server refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.engine.request import FinishReason
from nsm_core.errors import EngineDead
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import Outcome, make_request, random_ids
from tests.support.triton_servers import eventually
from tests.support.triton_stand_in import StandIn, hurry, is_up, random_loaded, running_backend, stand_ins

TEXT: dict[str, Any] = {"prompt_ids": random_ids(1, 40), "temperature": 1.0, "max_tokens": 12, "seed": 3}
LONG = 500  # tokens: more than a second, some of which the other server takes for a few


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
async def server(tiny_tokenizer: Tokenizer) -> AsyncIterator[StandIn]:
    server = StandIn(random_loaded(tiny_tokenizer), max_slots=4)
    async with stand_ins(server):
        yield server


async def test_gateways_that_share_a_server_get_their_own_events(server: StandIn) -> None:
    async with running_backend(server) as one, running_backend(server) as two:
        pairs = [
            (backend, make_request(str(seed), **{**TEXT, "seed": seed})) for seed in (1, 2) for backend in (one, two)
        ]
        got = await asyncio.gather(*(read(backend.submit(request)) for backend, request in pairs))
        assert got[0].ids == got[1].ids != got[2].ids == got[3].ids
        assert one.stats().tokens_generated == two.stats().tokens_generated == 24


async def test_one_link_carries_all_requests_and_is_no_call_for_each(server: StandIn) -> None:
    async with running_backend(server) as backend:
        await asyncio.gather(*(read(backend.submit(make_request(str(number), **TEXT))) for number in range(5)))
    assert server.operations.count("link") == 1
    assert server.operations.count("generate") == 0
    assert len(server.options) == 5


async def test_T7_a_request_that_a_stopping_server_refuses_goes_elsewhere_and_the_others_stay(
    server: StandIn, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StandIn(server.loaded, max_slots=4)
    async with stand_ins(other), running_backend(server, other) as backend:
        stays = backend.submit(make_request("stays", **{**TEXT, "max_tokens": LONG}))
        events = stays.events()
        got = Outcome([await anext(events)])
        stopping, goes_on = (server, other) if server.options else (other, server)
        (link,) = [one for one in backend.upstreams if one.url == stopping.url]
        # before a heartbeat tells, the next request goes there
        monkeypatch.setattr(backend.upstreams, "pick", first_then(backend.upstreams.pick, link))
        stopping.is_unloading = stopping.refuses_words = True
        refused = await read(backend.submit(make_request("refused", **TEXT)))
        assert refused.finished.reason is FinishReason.LENGTH
        assert len(goes_on.options) == 1
        got.events += [event async for event in events]
        assert (len(got.ids), got.finished.reason) == (LONG, FinishReason.LENGTH)
        assert backend.upstream_stats().num_failovers == 1


def first_then(pick: Any, first: Any) -> Any:
    choices = [first]
    return lambda *args, **options: choices.pop() if choices else pick(*args, **options)


async def test_a_server_that_opens_no_link_is_not_used(
    server: StandIn, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_backend(server) as backend:
        await server.stop()
        await eventually(lambda: is_up(backend, 0))
        server.opens_links = False
        await server.start()
        (upstream,) = backend.upstreams

        async def is_reported() -> bool:
            return "opens no link" in str(upstream.error)

        await eventually(is_reported)
        with pytest.raises(EngineDead):
            backend.submit(make_request())
        server.opens_links = True
        await eventually(lambda: is_up(backend, 1))


async def read(generation: Any) -> Outcome:
    return Outcome([event async for event in generation.events()])
