"""How much of a turn the session store takes: `python -m benchmarks.turn_store_share`. A table, then one line of JSON.

Turns of 64 tokens of pulse-books in this process, over HTTP without a socket. A turn waits for the store before
it begins (`fetch`: lease, head, state and its record) and before its end is told (`commit`: making the
snapshot, writing it with log, head and result). These are the share. What is written meanwhile (`append_turn`: the
tokens as they come; `renew`) is told apart: the turn does not wait for it. Redis: a server on loopback, with its
append-only file synced at each write or each second.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.session_store import opened
from nsm_core.config import EngineConfig
from nsm_core.model.loader import load_checkpoint
from nsm_lab.provenance import command_line, source_commit
from service.app import create_app
from service.backends.local import LocalBackend
from service.settings import Settings
from service.stores.sessions.base import SessionStore

KINDS = ("sqlite FULL", "redis always", "redis everysec")
TIMED = ("append_turn", "renew")
MEASURED = {"fetch": "nsm_state_fetch_seconds_sum", "commit": "nsm_state_commit_seconds_sum"}  # by the server itself
WAITED_FOR = ("fetch", "commit")
BESIDE = ("append_turn", "renew")
NUM_WARM_UP = 2
TEXT = "And what did they say to him then, when he came home at last?"


class Stopwatch:
    """Puts a clock around those calls of a store that turns make."""

    def __init__(self, store: SessionStore) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        for name in TIMED:
            setattr(store, name, self._timed(name, getattr(store, name)))

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any, **fields: Any) -> Any:
            start = time.perf_counter()
            try:
                return await call(*args, **fields)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


async def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the turns, in milliseconds, and the share of a turn that it waits for the store."""
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        async with opened(kind, Path(directory)) as (store, _):
            await store.close()  # the application opens it
            stopwatch, backend = Stopwatch(store), LocalBackend(load_checkpoint(MEASURED_MODEL), EngineConfig())
            app = create_app(Settings(data_dir=Path(directory), prefix_cache_mb=0), backend, store)
            async with app.router.lifespan_context(app):
                rows = await take_turns(app, stopwatch, args)
    return {"store": kind, "state_bytes": backend.model.state_bytes, **summary(rows[NUM_WARM_UP:])}


async def take_turns(app: FastAPI, stopwatch: Stopwatch, args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each turn of one session, of its whole and of its parts."""

    def measured() -> dict[str, float]:
        registry = app.state.services.metrics.registry
        return {name: registry.get_sample_value(metric) or 0.0 for name, metric in MEASURED.items()}

    rows, transport = [], httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport, timeout=600) as client:
        (await client.post("/v1/sessions", json={"id": "s"})).raise_for_status()
        for _ in range(NUM_WARM_UP + args.turns):
            stopwatch.seconds.clear()
            before, start = measured(), time.perf_counter()
            body = {"input": TEXT, "max_tokens": args.tokens, "ignore_eos": True, "seed": 0}
            (await client.post("/v1/sessions/s/generate", json=body)).raise_for_status()
            turn_s, after = time.perf_counter() - start, measured()
            spent = {name: after[name] - before[name] for name in MEASURED}
            rows.append({"turn": turn_s, **spent, **stopwatch.seconds})
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    names = ("turn", *WAITED_FOR, *BESIDE)
    times = {f"{name}_ms": round(1000 * statistics.median(row.get(name, 0.0) for row in rows), 2) for name in names}
    shares = [sum(row.get(name, 0.0) for name in WAITED_FOR) / row["turn"] for row in rows]
    return {**times, "share": round(statistics.median(shares), 4), "share_p95": round(percentile(shares, 0.95), 4)}


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[round(fraction * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64, help="sampled in each turn")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = [kind for kind in KINDS if kind.startswith("sqlite") or shutil.which("redis-server")]
    rows = [asyncio.run(measure(kind, args)) for kind in kinds]
    print(f"$ {command_line()}")
    for name in rows[0]:
        print(f"{name:<16}" + "".join(f"{row[name]:>16}" for row in rows))
    fields = {
        "benchmark": "turn_store_share",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "threads": args.threads,
        "turn_tokens": args.tokens,
        "rows": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
