"""What a batch costs live requests: `python -m benchmarks.batch_priority`. A table, then one line of JSON.

One engine, as `nsm serve` has it. Live requests come one after the other: a prompt, then a few tokens. Beside them run
no others; requests of a batch, which stand behind; or the same requests as live ones, as it would be without an order.
Each kind in turn, round by round, so that the machine's speed is in all of them. The batch's rows are kept at half of
the slots, as a gateway does at most.

The time to the first token is CPU time of the whole process: what the engine does before that token. A busy neighbour
changes it little. The time that passes stands beside it, and means something on a quiet machine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.about import about_this_run
from nsm_core.architectures import load_model
from nsm_core.config import EngineLimits
from nsm_core.engine.request import GenerationRequest, TokenEvent
from nsm_core.execution.devices import engine_config
from nsm_core.model.bundled import find_checkpoint
from nsm_core.sampling.params import SamplingParams
from service.backends.local import LocalBackend

KINDS = ("alone", "behind", "beside")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch."""

    num_prompt: int
    num_tokens: int
    is_background: bool


async def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pulse-books-keyed")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a live prompt")
    parser.add_argument("--batch-prompt", type=int, default=300, help="tokens of a prompt of the batch")
    parser.add_argument("--batch-tokens", type=int, default=200, help="of an answer of the batch")
    parser.add_argument("--tokens", type=int, default=16, help="of a live answer")
    parser.add_argument("--requests", type=int, default=8, help="live ones of each round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    loaded = load_model(find_checkpoint(Path(args.model)))
    backend = LocalBackend(loaded, engine_config(EngineLimits(max_slots=args.slots), loaded))
    firsts: dict[str, list[float]] = {kind: [] for kind in KINDS}
    works: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    await backend.start()
    try:
        for _ in range(args.rounds):
            for kind in KINDS:
                number = 0 if kind == "alone" else args.slots // 2
                line = Line(args.batch_prompt, args.batch_tokens, is_background=kind == "behind")
                async with batch(backend, number, line) as counted:
                    started, before = time.perf_counter(), counted[0]
                    for _ in range(args.requests):
                        work, first = await live(backend, args.prompt, args.tokens)
                        works[kind].append(work)
                        firsts[kind].append(first)
                    rates[kind].append((counted[0] - before) / (time.perf_counter() - started))
    finally:
        await backend.stop()
    rows = [
        {
            "kind": kind,
            "cpu_p50_ms": round(statistics.median(works[kind]) * 1e3, 1),
            "cpu_p95_ms": round(statistics.quantiles(works[kind], n=20)[-1] * 1e3, 1),
            "wall_p50_ms": round(statistics.median(firsts[kind]) * 1e3, 1),
            "batch_tokens_per_s": round(statistics.median(rates[kind]), 1),
        }
        for kind in KINDS
    ]
    print(f"{'batch':>8}{'first, CPU ms p50':>19}{'p95':>9}{'wall ms p50':>13}{'batch tokens/s':>16}")
    for row in rows:
        numbers = row["cpu_p50_ms"], row["cpu_p95_ms"], row["wall_p50_ms"], row["batch_tokens_per_s"]
        print(f"{row['kind']:>8}{numbers[0]:>19}{numbers[1]:>9}{numbers[2]:>13}{numbers[3]:>16}")
    result = {**about_this_run(), "rows": rows}
    print(json.dumps(result))
    return result


@contextlib.asynccontextmanager
async def batch(backend: LocalBackend, number: int, kind: Line) -> AsyncIterator[list[int]]:
    """So many requests at a time, the next when one ends; gives the count of their tokens."""
    counted, begun = [0], asyncio.Event()

    async def line() -> None:
        while True:
            made = request(backend, kind.num_prompt, kind.num_tokens, is_background=kind.is_background)
            generation = backend.submit(made)
            try:
                async for event in generation.events():
                    counted[0] += isinstance(event, TokenEvent)
                    if counted[0] == number:
                        begun.set()
            finally:
                generation.cancel()

    tasks = [asyncio.create_task(line()) for _ in range(number)]
    try:
        if tasks:
            await begun.wait()
        yield counted
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def live(backend: LocalBackend, num_prompt: int, num_tokens: int) -> tuple[float, float]:
    """Seconds to the first token: of CPU, and passed."""
    started, cpu, work, first = time.perf_counter(), time.process_time(), 0.0, 0.0
    async for event in backend.submit(request(backend, num_prompt, num_tokens)).events():
        if isinstance(event, TokenEvent) and not first:
            work, first = time.process_time() - cpu, time.perf_counter() - started
    return work, first


def request(
    backend: LocalBackend, num_prompt: int, num_tokens: int, *, is_background: bool = False
) -> GenerationRequest:
    number = next(_numbers)
    ids = tuple((7 * number + 13 * index) % (backend.model.vocab_size - 1) + 1 for index in range(num_prompt))
    sampling = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
    return GenerationRequest(
        request_id=f"r{number}", prompt_ids=ids, sampling=sampling, is_background=is_background, owner="live"
    )


if __name__ == "__main__":
    asyncio.run(main())
