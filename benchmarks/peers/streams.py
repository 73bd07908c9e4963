"""HTTP streaming: `llama-server` and `nsm serve` under the load of `nsm bench http`, by turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.build_llama import LlamaBuild
from benchmarks.peers.figures import OURS, OURS_INT4, OURS_INT4_HALF, Taken, add
from benchmarks.peers.servers import llama_server, nsm_server
from nsm_core.execution.names import ExecutorName
from nsm_lab.bench.http_load import HttpLoad, HttpWork

EXECUTORS: dict[str, ExecutorName] = {
    OURS: "auto",
    OURS_INT4: "native-int4",
    OURS_INT4_HALF: "native-int4-fp16-states",
}
CONTEXT_MORE = 128  # tokens that each of llama-server's slots holds beside those of two for each word
SHOWN = ("tokens_per_cpu_s", "tokens_per_s", "ttft_p50_ms")


async def measure_streams(
    build: LlamaBuild,
    directory: Path,
    model: Path,
    *,
    peers: Sequence[str],
    clients: Sequence[int],
    num_words: int,
    num_tokens: int,
    threads: int,
    rounds: int,
    progress: Callable[[str], None],
) -> Taken:
    """All servers run from the start; one at a time is asked, in another order each round. Raises NsmError."""
    taken: Taken = {}
    work = HttpWork(concurrencies=tuple(clients), num_tokens=num_tokens, num_words=num_words, lengths=(), repeats=1)
    slots, context = max(clients), 2 * num_words + num_tokens + CONTEXT_MORE
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(nsm_server(directory, model, slots=slots, threads=threads, executor=executor))
            for name, executor in EXECUTORS.items()
        }
        for name in peers:
            peer = llama_server(build, name, directory, slots=slots, context=context, threads=threads)
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
