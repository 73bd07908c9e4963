"""What a turn costs in the SQLite store: `python -m benchmarks.session_store`. A table, then one line of JSON.

Acquire (lease, head and snapshot, with the checksum verified) and commit (snapshot, log and head in one transaction),
by how SQLite syncs: FULL is what the server uses, NORMAL would lose acknowledged turns in a power cut. Run it on the
disk that you mean (`--dir`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from nsm_core.evaluation.report import source_commit
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader, TensorLayout
from service.sessions import sqlite_schema
from service.sessions.sqlite import SqliteSessionStore

NUM_WARM_UP = 5


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


async def one_turn(store: SqliteSessionStore, raw: bytes) -> tuple[float, float]:
    """Seconds to acquire and to commit."""
    start = time.perf_counter()
    leased = await store.acquire(tenant="default", session_id="s", holder="benchmark", lease_s=10.0)
    acquired = time.perf_counter()
    head = leased.stored.head
    await store.commit(
        leased.lease,
        expected_version=head.version,
        snapshot=raw,
        position=head.position + 64,
        model_fingerprint="benchmark",
        new_ids=tuple(range(64)),
        num_sampled=64,
        seed=0,
    )
    return acquired - start, time.perf_counter() - acquired


async def measure(directory: Path, sync: str, *, num_turns: int, state_bytes: int) -> dict[str, float]:
    """Milliseconds: medians and 95th percentiles."""
    safe = sqlite_schema.PRAGMAS
    sqlite_schema.PRAGMAS = safe.replace("synchronous = FULL", f"synchronous = {sync}")
    store = SqliteSessionStore(directory / f"{sync}.db")
    try:
        await store.open()
        await store.create(tenant="default", session_id="s", model_fingerprint="benchmark", metadata={})
        acquires, commits = [], []
        for number in range(NUM_WARM_UP + num_turns):
            acquire_s, commit_s = await one_turn(store, make_snapshot(number + 1, state_bytes))
            if number >= NUM_WARM_UP:
                acquires.append(acquire_s * 1000)
                commits.append(commit_s * 1000)
    finally:
        await store.close()
        sqlite_schema.PRAGMAS = safe
    return {
        "acquire_p50_ms": round(statistics.median(acquires), 2),
        "acquire_p95_ms": round(statistics.quantiles(acquires, n=20)[-1], 2),
        "commit_p50_ms": round(statistics.median(commits), 2),
        "commit_p95_ms": round(statistics.quantiles(commits, n=20)[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--state-bytes", type=int, default=2_250_000, help="size of one state")
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        for sync in ("FULL", "NORMAL"):
            rows[sync] = asyncio.run(measure(Path(directory), sync, num_turns=args.turns, state_bytes=args.state_bytes))
    names = list(rows["FULL"])
    print("synchronous " + " ".join(f"{name:>14}" for name in names))
    for sync, row in rows.items():
        print(f"{sync:<12}" + " ".join(f"{row[name]:>14.2f}" for name in names))
    fields = {
        "benchmark": "session_store",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "sqlite": sqlite3.sqlite_version,
        "turns": args.turns,
        "state_bytes": args.state_bytes,
        "rows": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
