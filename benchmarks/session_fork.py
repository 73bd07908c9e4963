"""What a fork costs by the length of its log: `python -m benchmarks.session_fork`. A table, then one line of JSON.

The SQLite store; the state has the size of that of pulse-books, the log grows by 4 bytes a token.
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

from benchmarks.session_store import make_snapshot
from nsm_lab.provenance import source_commit
from service.state.copies import create_copy, read_copy
from service.stores.sessions.base import Commit, NewSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore

TURN_TOKENS = 128
NUM_WARM_UP = 3


async def make_session(store: SqliteSessionStore, num_tokens: int, state_bytes: int) -> None:
    """A session "s" with a log of `num_tokens`, in turns of TURN_TOKENS."""
    await store.create(NewSession(key=SessionKey("default", "s"), model_fingerprint="benchmark", metadata={}))
    for start in range(0, num_tokens, TURN_TOKENS):
        new_ids = tuple(range(start, min(start + TURN_TOKENS, num_tokens)))
        leased = await store.acquire(SessionKey("default", "s"), holder="benchmark", lease_s=10.0)
        version, is_last = leased.stored.head.version, start + TURN_TOKENS >= num_tokens
        await store.commit(
            leased.lease,
            Commit(
                expected_version=version,
                snapshot=make_snapshot(version + 1, state_bytes if is_last else 64),
                position=version + 1,  # what make_snapshot writes
                model_fingerprint="benchmark",
                new_ids=new_ids,
                num_sampled=len(new_ids),
                seed=0,
            ),
        )


async def measure(directory: Path, num_tokens: int, *, num_forks: int, state_bytes: int) -> dict[str, float]:
    store = SqliteSessionStore(directory / f"{num_tokens}.db")
    await store.open()
    try:
        await make_session(store, num_tokens, state_bytes)
        times = []
        for number in range(NUM_WARM_UP + num_forks):
            start = time.perf_counter()
            copy = await read_copy(store, SessionKey("default", "s"))
            await create_copy(
                store, copy, SessionKey("default", f"f{number}"), metadata={}, ttl_s=None, forked_from=None
            )
            times.append((time.perf_counter() - start) * 1000)
    finally:
        await store.close()
    times = times[NUM_WARM_UP:]
    p95 = statistics.quantiles(times, n=20)[-1]
    return {"fork_p50_ms": round(statistics.median(times), 2), "fork_p95_ms": round(p95, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where the files are made (default: a temporary place)")
    parser.add_argument("--forks", type=int, default=30)
    parser.add_argument("--state-bytes", type=int, default=3_780_616, help="size of one state")
    args = parser.parse_args()
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        for num_tokens in (128, 1_024, 16_384, 131_072):
            rows[num_tokens] = asyncio.run(
                measure(Path(directory), num_tokens, num_forks=args.forks, state_bytes=args.state_bytes)
            )
    names = list(rows[128])
    print("log tokens  " + " ".join(f"{name:>12}" for name in names))
    for num_tokens, row in rows.items():
        print(f"{num_tokens:<12}" + " ".join(f"{row[name]:>12.2f}" for name in names))
    fields = {
        "benchmark": "session_fork",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "sqlite": sqlite3.sqlite_version,
        "forks": args.forks,
        "state_bytes": args.state_bytes,
        "rows": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
