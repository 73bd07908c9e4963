"""Counts equal requests, whatever becomes of them."""

from __future__ import annotations

import asyncio
import random

import httpx

from nsm_core.tokenizer import Tokenizer
from tests.support.gateway import Gateway, gateway
from tests.support.models import local_backend

NUM_BODIES = 40
ENDS = ("stop", "length", "abort", "abort_before_first_token", "error")


async def ask(server: Gateway, number: int, choice: random.Random) -> tuple[int, int]:
    """One body of a random kind; how many requests it makes, and how many of them are answered to their end."""
    kind = choice.choice(("whole", "stream", "leave", "late", "bad", "many"))
    body: dict[str, object] = {"prompt": [1 + number, 2, 3], "max_tokens": choice.randint(1, 12), "ignore_eos": True}
    path = "/v1/completions"
    if kind == "many":
        await server.client.post(path, json={**body, "n": 3})
        return 3, 3
    if kind == "bad":
        assert (await server.client.post(path, json={**body, "temperature": 9})).status_code == 400
        return 0, 0
    if kind == "late":
        assert (await server.client.post(path, json={**body, "timeout": 1e-6})).status_code == 504
    elif kind == "leave":
        await leave_early(server, {**body, "max_tokens": 200, "stream": True}, after=choice.randint(0, 3))
    else:
        await server.client.post(path, json={**body, "stream": kind == "stream"})
        return 1, 1
    return 1, 0


async def leave_early(server: Gateway, body: dict[str, object], *, after: int) -> None:
    async with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        for _ in range(after):
            await anext(lines)


def ended(server: Gateway) -> float:
    return sum(server.metric("nsm_request_success_total", finished_reason=reason) for reason in ENDS)


async def test_M1_every_request_ends_once_in_every_count(tiny_tokenizer: Tokenizer) -> None:
    choice = random.Random(7)
    backend = local_backend(tiny_tokenizer, max_slots=3, queue_limit=64)
    async with gateway(backend, is_live=True, prefix_cache_mb=0) as server:
        server.client.timeout = httpx.Timeout(60)
        asked = await asyncio.gather(*(ask(server, number, choice) for number in range(NUM_BODIES)))
        num_requests, num_answered = (sum(column) for column in zip(*asked, strict=True))
        assert 0 < num_answered < num_requests
        async with asyncio.timeout(60):
            while ended(server) < num_requests or server.metric("nsm_num_requests_running"):  # noqa: ASYNC110  # by counts alone
                await asyncio.sleep(0.005)
        assert ended(server) == num_requests
        assert server.metric("nsm_e2e_request_latency_seconds_count") == num_requests
        assert server.metric("nsm_num_requests_waiting") == 0
        stats = backend.stats()
        assert server.metric("nsm_generation_tokens_total") == stats.tokens_generated
        for name in ("queue_time_seconds", "decode_time_seconds", "prompt_tokens", "generation_tokens"):
            # one that is late or whose client left may have any of them or none
            assert num_answered <= server.metric(f"nsm_request_{name}_count") <= num_requests, name
        http = sum(
            server.metric("nsm_http_requests_total", method="POST", route="/v1/completions", status=status)
            for status in ("200", "400", "504", "499")
        )
        assert http == NUM_BODIES
