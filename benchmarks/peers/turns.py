"""Turns of many sessions beside requests without one: what a session costs our server, in CPU time of all threads.

So many sessions take turns, some of them at once; requests without a session have as many tokens in and out, and as
many run at once. Both stream. By turns, so that drift favours nobody; each session has a turn before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import OURS, Taken, add
from benchmarks.peers.servers import Server, nsm_server
from benchmarks.peers.sessions import random_ids
from benchmarks.peers.streams import in_turn

NUM_SESSIONS, AT_ONCE = 60, 16
TOKENS_IN, TOKENS_OUT = 22, 32
SESSION, STATELESS = "session", "stateless"


class Turns:
    """The requests of either kind, to one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def open(self) -> None:
        """Makes the sessions, each with a turn."""
        for number in range(NUM_SESSIONS):
            await self._server.endpoint.json("POST", "/v1/sessions", {"id": f"turns-{number}"})
        await self.cpu_ms(SESSION)

    async def cpu_ms(self, kind: str) -> float:
        """CPU time of a request, the mean of one for each session. Raises NsmError."""
        started, room = self._server.use.cpu_s(), asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                await (self._turn(number) if kind == SESSION else self._completion())

        pending: list[Awaitable[None]] = [one(number) for number in range(NUM_SESSIONS)]
        await asyncio.gather(*pending)
        return (self._server.use.cpu_s() - started) / NUM_SESSIONS * 1e3

    async def _turn(self, number: int) -> None:
        await self._stream(f"/v1/sessions/turns-{number}/generate", {"input": random_ids(TOKENS_IN)})

    async def _completion(self) -> None:
        await self._stream("/v1/completions", {"prompt": random_ids(TOKENS_IN)})

    async def _stream(self, path: str, body: dict[str, Any]) -> None:
        fields = {**body, "max_tokens": TOKENS_OUT, "temperature": 0.8, "ignore_eos": True, "stream": True}
        async with contextlib.aclosing(self._server.endpoint.events(path, fields)) as events:
            async for _ in events:
                pass


async def measure_turns(
    directory: Path, model: Path, *, threads: int, rounds: int, progress: Callable[[str], None]
) -> Taken:
    """Raises NsmError."""
    taken: Taken = {}
    with nsm_server(directory, model, slots=AT_ONCE, threads=threads) as server:
        turns = Turns(server)
        await turns.open()
        await turns.cpu_ms(STATELESS)
        for number in range(rounds):
            for kind in in_turn([SESSION, STATELESS], number):
                add(taken, OURS, {f"turns.{AT_ONCE}.{kind}_cpu_ms": await turns.cpu_ms(kind)})
            progress(f"turns, round {number + 1}")
    return taken
