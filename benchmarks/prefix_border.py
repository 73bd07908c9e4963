"""From how many tokens on a stored beginning is cheaper than reading: `python -m benchmarks.prefix_border`.

Prompts that nobody repeats, one at a time through the gateway's stateless call: with stored prefixes off, with all of
them kept, and the same prompts with one token more, which start from what was kept. CPU milliseconds of the process a
prompt, writing and dropping included: the median of rounds in which the three take turns. A table, then a line of JSON.

`borders`: the tokens from which keeping every prompt's state pays, if one in so many prompts is ever gone on with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.prefix_resume import opened
from nsm_core.config import EngineConfig
from nsm_core.model.loader import load_checkpoint
from nsm_lab.provenance import source_commit
from service.app import create_app
from service.backends.local import LocalBackend
from service.deps import Arrival, Services
from service.generate.completions import open_completion
from service.schemas.completions import CompletionBody
from service.settings import Settings
from service.stores.prefixes.keys import MIN_TOKENS
from service.stores.sessions.sqlite import SqliteSessionStore

LENGTHS = (80, 128, 192, 256, 384, 512)
REUSED = (1, 2, 4, 8)  # one in so many states


async def ask(services: Services, prompt: list[int], *, is_cached: bool) -> float:
    """CPU milliseconds of a prompt and one new token, with everything that is done behind it."""
    body = CompletionBody.model_validate({"prompt": prompt, "max_tokens": 1, "cache_prompt": is_cached})
    start = time.process_time()
    answer = await open_completion(services, "default", body, Arrival(request_id="border", time=time.monotonic()))
    async for _ in answer.frames():
        pass
    answer.leave()
    await services.prefix_resume.drain()
    return 1000 * (time.process_time() - start)


async def measure(services: Services, length: int, *, rounds: int, seed: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {"off": [], "kept": [], "resumed": []}
    for number in range(rounds):
        prompt = [(seed + 7919 * number + 31 * length * index) % 8000 + 1 for index in range(length)]
        taken["off"].append(await ask(services, prompt, is_cached=False))
        taken["kept"].append(await ask(services, prompt, is_cached=True))
        taken["resumed"].append(await ask(services, [*prompt, 5], is_cached=True))
    return {"prompt_tokens": length} | {name: round(statistics.median(each), 2) for name, each in taken.items()}


def borders(rows: list[dict[str, float]]) -> dict[int, float]:
    """By `REUSED`: the tokens whose reading costs what keeping `reused` states and going on from one costs."""
    reading = statistics.linear_regression([row["prompt_tokens"] for row in rows], [row["off"] for row in rows])
    keeping = statistics.median(row["kept"] - row["off"] for row in rows)
    fetching = statistics.median(row["resumed"] for row in rows) - reading.intercept
    return {reused: round((reused * keeping + fetching) / reading.slope) for reused in REUSED}


async def run(backend: LocalBackend, kind: str, rounds: int) -> list[dict[str, float]]:
    settings = Settings(data_dir=Path("unused"), store="memory")
    with tempfile.TemporaryDirectory() as directory:
        async with opened(kind, Path(directory)) as store:
            app = create_app(settings, backend, SqliteSessionStore(None), store, prefix_min_tokens=MIN_TOKENS)
            async with app.router.lifespan_context(app):
                services = app.state.services
                await measure(services, LENGTHS[0], rounds=3, seed=1)
                return [await measure(services, length, rounds=rounds, seed=2) for length in LENGTHS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("memory", "redis"), default="memory")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = LocalBackend(load_checkpoint(MEASURED_MODEL), EngineConfig())
    rows = asyncio.run(run(backend, args.store, args.rounds))
    print("".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>16}" for value in row.values()))
    found = borders(rows)
    for reused, tokens in found.items():
        print(f"one state in {reused} gone on with: from {tokens} tokens on")
    fields = {"benchmark": "prefix_border", "commit": source_commit(), "numerics": backend.model.numerics}
    print(json.dumps({**fields, "store": args.store, "num_cores": os.cpu_count(), "rows": rows, "borders": found}))


if __name__ == "__main__":
    main()
