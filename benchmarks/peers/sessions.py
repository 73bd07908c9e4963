"""A long session's next turn after a restart: our stored session against `llama-server`'s slot file, and both against
reading the whole text again.

Time to first token as the client sees it. llama-server's is restoring the slot plus a request with all the tokens,
since its interface keeps no session; our turn sends the new tokens alone. Both come from a file that was written before
the restart.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.build_llama import LlamaBuild
from benchmarks.peers.figures import Figures, Taken, add
from benchmarks.peers.models import VOCAB_SIZE
from benchmarks.peers.servers import Server, llama_server, nsm_server

NEW_TOKENS = 16
SLOT_FILE = "slot.bin"


class Clocks:
    """Wall time of a request to its first token, and the server's CPU time until its answer ended."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[float, float]:
        """ms and CPU ms. Raises NsmError."""
        fields = {**body, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        cpu_s, started = self._server.use.cpu_s(), time.perf_counter()
        first = None
        async with contextlib.aclosing(self._server.endpoint.events(path, fields)) as events:
            async for _ in events:
                first = first or time.perf_counter()
        return ((first or time.perf_counter()) - started) * 1e3, (self._server.use.cpu_s() - cpu_s) * 1e3


async def measure_ours(directory: Path, model: Path, *, length: int, repeats: int) -> Taken:
    """Raises NsmError."""
    taken: Taken = {}
    path, at = "/v1/sessions/long/generate", f"session.{length}"
    with nsm_server(directory, model, slots=1) as server:
        await server.endpoint.json("POST", "/v1/sessions", {"id": "long"})
        wall, cpu = await Clocks(server).ask(path, {"input": random_ids(length)})
        add(taken, "ours", {f"{at}.reread_ms": wall, f"{at}.reread_cpu_ms": cpu})
    with nsm_server(directory, model, slots=1) as server:
        await server.endpoint.json("POST", "/v1/sessions", {"id": "short"})
        await Clocks(server).ask("/v1/sessions/short/generate", {"input": random_ids(NEW_TOKENS)})  # the first of all
        for _ in range(repeats):
            wall, cpu = await Clocks(server).ask(path, {"input": random_ids(NEW_TOKENS)})
            add(taken, "ours", resumed_figures(at, wall, cpu))
    return taken


async def measure_llama(build: LlamaBuild, name: str, directory: Path, *, length: int, repeats: int) -> Taken:
    """Raises NsmError."""
    taken: Taken = {}
    text, at = random_ids(length), f"session.{length}"
    sizes = {"slots": 1, "context": length + 2 * NEW_TOKENS}
    with llama_server(build, name, directory, **sizes) as server:
        wall, cpu = await Clocks(server).ask("/v1/completions", {"prompt": text, "id_slot": 0})
        add(taken, name, {f"{at}.reread_ms": wall, f"{at}.reread_cpu_ms": cpu})
        await server.endpoint.json("POST", "/slots/0?action=save", {"filename": SLOT_FILE})
    with llama_server(build, name, directory, **sizes) as server:
        await Clocks(server).ask("/v1/completions", {"prompt": random_ids(NEW_TOKENS), "id_slot": 0})
        for _ in range(repeats):
            await server.endpoint.json("POST", "/slots/0?action=erase", {})
            add(taken, name, resumed_figures(at, *await _restored(server, text)))
    return taken


async def _restored(server: Server, text: Sequence[int]) -> tuple[float, float]:
    cpu_s, started = server.use.cpu_s(), time.perf_counter()
    await server.endpoint.json("POST", "/slots/0?action=restore", {"filename": SLOT_FILE})
    restore = (time.perf_counter() - started) * 1e3
    wall, _ = await Clocks(server).ask("/v1/completions", {"prompt": [*text, *random_ids(NEW_TOKENS)], "id_slot": 0})
    return restore + wall, (server.use.cpu_s() - cpu_s) * 1e3


def resumed_figures(at: str, wall_ms: float, cpu_ms: float) -> Figures:
    return {f"{at}.resumed_ms": wall_ms, f"{at}.resumed_cpu_ms": cpu_ms}


def random_ids(number: int) -> list[int]:
    return [random.randrange(1, VOCAB_SIZE) for _ in range(number)]
