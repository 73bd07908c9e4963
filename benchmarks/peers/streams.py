"""HTTP streaming: `llama-server` and `nsm serve` under the load of `nsm bench http`, by turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.build_llama import LlamaBuild
from benchmarks.peers.figures import LLAMA_CPP, OURS, Taken, add
from benchmarks.peers.servers import CONTEXT_OF_STREAM, llama_server, nsm_server
from nsm_lab.bench.http_load import HttpLoad, HttpWork

SHOWN = ("tokens_per_cpu_s", "tokens_per_s", "ttft_p50_ms")


async def measure_streams(
    build: LlamaBuild,
    directory: Path,
    model: Path,
    *,
    clients: Sequence[int],
    num_tokens: int,
    rounds: int,
    progress: Callable[[str], None],
) -> Taken:
    """All servers run from the start; one at a time is asked, in another order each round. Raises NsmError."""
    taken: Taken = {}
    work = HttpWork(concurrencies=tuple(clients), num_tokens=num_tokens, lengths=(), repeats=1)
    slots = max(clients)
    with contextlib.ExitStack() as stack:
        servers = {OURS: stack.enter_context(nsm_server(directory, model, slots=slots))}
        for name in LLAMA_CPP:
            peer = llama_server(build, name, directory, slots=slots, context=CONTEXT_OF_STREAM)
            servers[name] = stack.enter_context(peer)
        loads = {name: HttpLoad(server.endpoint, work, server.use) for name, server in servers.items()}
        for name in loads:
            await HttpLoad(
                servers[name].endpoint, HttpWork(concurrencies=(slots,), num_tokens=4, lengths=(), repeats=1)
            ).once()
        for number in range(rounds):
            for name in in_turn(list(loads), number):
                figures = await loads[name].once()
                add(taken, name, {key: figures[key] for key in figures if key.split(".")[-1] in SHOWN})
                progress(f"streams, round {number + 1}: {name}")
    return taken


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Another one is first in each round, so that drift favours nobody."""
    start = number % len(names)
    return [*names[start:], *names[:start]]
