"""What a turn costs in the session stores: `python -m benchmarks.session_store`. A table, then one line of JSON.

Acquire (lease, head and snapshot, with the checksum verified) and commit (snapshot, log and head together), by size of
the state and by how the store syncs. SQLite: FULL is what the server uses, NORMAL would lose acknowledged turns in a
power cut. Redis: a server that is started here, on loopback, with its append-only file synced `always` or `everysec`;
and what the session takes there in the end (MEMORY USAGE of its keys), against the state alone. Run it on the disk that
you mean (`--dir`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from redis.asyncio import Redis

from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader, TensorLayout
from nsm_lab.provenance import source_commit
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import Commit, NewSession, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sqlite import schema as sqlite_schema

NUM_WARM_UP = 5
STATE_BYTES = (3_780_616, 945_154)  # pulse-books' state in fp32, and in a quarter of that
KINDS = ("sqlite FULL", "sqlite NORMAL", "redis always", "redis everysec")


def make_snapshot(version: int, state_bytes: int) -> bytes:
    header = SnapshotHeader(
        model_fingerprint="benchmark",
        numerics="none",
        tokenizer_fingerprint="benchmark",
        layout=(TensorLayout("state", (state_bytes // 4,), "float32"),),
        position=version,
        pending_id=None,
        sampler=SamplerState(seed=0, generated_counts={}),
        tenant="default",
        session_id="s",
        version=version,
        parent=version - 1,
        created_at=time.time(),
    )
    return Snapshot(header, os.urandom(state_bytes // 4 * 4)).encode()


@contextlib.asynccontextmanager
async def opened(kind: str, directory: Path) -> AsyncIterator[tuple[SessionStore, Redis | None]]:
    """An empty store and, for Redis, a client of its server."""
    name, _, sync = kind.partition(" ")
    if name == "redis":
        async with redis_store(directory, sync) as (store, client):
            yield store, client
        return
    safe = sqlite_schema.PRAGMAS
    sqlite_schema.PRAGMAS = safe.replace("synchronous = FULL", f"synchronous = {sync}")
    sqlite = SqliteSessionStore(directory / "sessions.db")
    try:
        await sqlite.open()
        yield sqlite, None
    finally:
        await sqlite.close()
        sqlite_schema.PRAGMAS = safe


@contextlib.asynccontextmanager
async def redis_store(directory: Path, sync: str) -> AsyncIterator[tuple[SessionStore, Redis]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "bind": "127.0.0.1",
        "port": port,
        "dir": directory,
        "save": "",
        "appendonly": "yes",
        "appendfsync": sync,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    server = await asyncio.create_subprocess_exec("redis-server", *words, stdout=asyncio.subprocess.DEVNULL)
    store, client = RedisSessionStore(parse_redis_url(f"redis://127.0.0.1:{port}")), Redis(port=port)
    try:
        await store.open()
        yield store, client
    finally:
        await client.aclose()
        await store.close()
        server.terminate()
        await server.wait()


async def one_turn(store: SessionStore, raw: bytes) -> tuple[float, float]:
    """Seconds to acquire and to commit."""
    start = time.perf_counter()
    leased = await store.acquire(SessionKey("default", "s"), holder="benchmark", lease_s=10.0)
    acquired = time.perf_counter()
    head = leased.stored.head
    await store.commit(
        leased.lease,
        Commit(
            expected_version=head.version,
            snapshot=raw,
            position=head.position + 64,
            model_fingerprint="benchmark",
            new_ids=tuple(range(64)),
            num_sampled=64,
            seed=0,
        ),
    )
    return acquired - start, time.perf_counter() - acquired


async def measure(kind: str, *, num_turns: int, state_bytes: int, parent: Path | None) -> dict[str, float]:
    """Milliseconds: medians and 95th percentiles. `times_state`: what the session takes in Redis."""
    acquires, commits = [], []
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        async with opened(kind, Path(directory)) as (store, client):
            await store.create(NewSession(key=SessionKey("default", "s"), model_fingerprint="benchmark", metadata={}))
            for number in range(NUM_WARM_UP + num_turns):
                acquire_s, commit_s = await one_turn(store, make_snapshot(number + 1, state_bytes))
                if number >= NUM_WARM_UP:
                    acquires.append(acquire_s * 1000)
                    commits.append(commit_s * 1000)
            memory = {} if client is None else {"times_state": round(await session_bytes(client) / state_bytes, 3)}
    return {
        "acquire_p50_ms": round(statistics.median(acquires), 2),
        "acquire_p95_ms": round(statistics.quantiles(acquires, n=20)[-1], 2),
        "commit_p50_ms": round(statistics.median(commits), 2),
        "commit_p95_ms": round(statistics.quantiles(commits, n=20)[-1], 2),
        **memory,
    }


async def session_bytes(client: Redis) -> int:
    """Memory of every key there is: one session's, and its share of the index."""
    keys = [key async for key in client.scan_iter("*")]
    return sum([int(await client.memory_usage(key, samples=0) or 0) for key in keys])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--state-bytes", type=int, nargs="+", default=STATE_BYTES, help="sizes of one state")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind.startswith("sqlite") or shutil.which("redis-server")]
    rows = [
        {"store": kind, "state_bytes": state_bytes}
        | asyncio.run(measure(kind, num_turns=args.turns, state_bytes=state_bytes, parent=args.dir))
        for state_bytes in args.state_bytes
        for kind in kinds
    ]
    names = max(rows, key=len)
    print("".join(f"{name:>16}" for name in names))
    for row in rows:
        print("".join(f"{row.get(name, ''):>16}" for name in names))
    fields = {
        "benchmark": "session_store",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "sqlite": sqlite3.sqlite_version,
        "turns": args.turns,
        "rows": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
